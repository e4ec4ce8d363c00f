"""Programs that read documents: MinerU's client, Docling's pipeline with a remote model, olmOCR's requests, and
LangChain's loader.

They send images of pages or PDFs, and parse what the model writes. They load no models here, and fetch nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from PIL import Image

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.errors import InvalidParameter
from dashinfer_vlm_core.testing import Script
from tests.clients.drivers import Part, Result, Served, openai_messages
from tests.clients.features import CHECKS, TEXT, run, serve_script
from tests.pdfs import document
from tests.samples import data_url, encode, noise
from tests.server.conftest import serving
from tests.tiny import write_checkpoint
from tests.waiting import HANG, until

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]

PAGE = Image.fromarray(noise(440, 310))
WRONG = InvalidParameter("This is wrong.", param="messages")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server whose context holds the 8,000 tokens that olmOCR requests."""
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_position_embeddings=16384)
    with serve_script(str(checkpoint)) as served:
        yield served


def count_image_tokens(served: Served, image: Image.Image) -> int:
    parts = [Part("image", data_url(encode(image))), TEXT]
    usage: Any = served.engine.chat({"messages": openai_messages(parts)}).usage
    return usage.prompt_tokens_details.image_tokens


def received_image_tokens(served: Served) -> list[int]:
    return [len(span.tokens.embedding) for request in served.script.requests for span in request.spans]


# MinerU

LAYOUT = (
    "<|box_start|>100 100 900 200<|box_end|><|ref_start|>title<|ref_end|><|rotate_up|>\n"
    "<|box_start|>100 300 900 600<|box_end|><|ref_start|>text<|ref_end|><|rotate_up|>\n"
)
"""Some of these are special tokens of the tokenizer."""


class MinerUClient:
    """The part of `mineru-vl-utils` that sends a request."""

    def __init__(self, served: Served) -> None:
        module = pytest.importorskip("mineru_vl_utils.vlm_client", reason="mineru-vl-utils is not installed")
        self._client = module.new_vlm_client(
            "http-client", server_url=served.url, http_timeout=HANG, max_retries=0, allow_truncated_content=True
        )

    async def ask(self, *parts: Part) -> Result:
        return Result(await asyncio.to_thread(self._client.predict, *self._arguments(parts)))

    async def stream(self, *parts: Part) -> AsyncGenerator[str, None]:
        stream = self._client.stream_predict(*self._arguments(parts))
        try:
            while (text := await asyncio.to_thread(next, stream, "end")) != "end":
                yield text or ""
        finally:
            await asyncio.to_thread(stream.close)

    def _arguments(self, parts: tuple[Part, ...]) -> tuple[list[str], str]:
        return [value for kind, value in parts if kind == "image"], parts[-1].value

    async def aclose(self) -> None:
        await self._client.aclose()


@pytest.mark.parametrize(
    "feature",
    [
        pytest.param(feature, marks=pytest.mark.client("mineru", feature))
        for feature in ("text", "image", "stream", "cancel")
    ],
)
def test_mineru_supports_feature(served, feature):
    CHECKS[feature](MinerUClient, served)


@pytest.mark.client("mineru", "image")
def test_mineru_finds_and_reads_the_blocks_of_a_page(served):
    mineru = pytest.importorskip("mineru_vl_utils", reason="mineru-vl-utils is not installed")
    served.script.play(LAYOUT, "Total: 12.50")
    client = mineru.MinerUClient("http-client", server_url=served.url, http_timeout=HANG, use_tqdm=False)
    blocks = client.two_step_extract(PAGE)
    asyncio.run(client.aclose())
    assert [(block.type, block.bbox, block.angle) for block in blocks] == [
        ("title", [0.1, 0.1, 0.9, 0.2], 0),
        ("text", [0.1, 0.3, 0.9, 0.6], 0),
    ]
    assert [block.content for block in blocks] == ["Total: 12.50", "Total: 12.50"]
    layout, *contents = [request.sampling for request in served.script.requests]
    assert {sampling.no_repeat_ngram_size for sampling in (layout, *contents)} == {100}
    assert [sampling.presence_penalty for sampling in contents] == [1.0, 1.0]


@pytest.mark.client("mineru", "errors")
def test_mineru_reports_the_servers_error(served):
    served.script.play(WRONG)

    async def scenario(client):
        with pytest.raises(Exception, match="This is wrong"):
            await client.ask(TEXT)

    run(MinerUClient, served, scenario)


def test_mineru_reads_what_the_decoder_samples(tiny_checkpoint):
    """The same text as a request without the parameters that change nothing for the most likely tokens."""
    mineru = pytest.importorskip("mineru_vl_utils", reason="mineru-vl-utils is not installed")
    config = EngineConfig(model=str(tiny_checkpoint), decoder="torch", device="cpu")
    params = mineru.MinerUSamplingParams(max_new_tokens=24, presence_penalty=1.0)
    with Engine(config) as engine, serving(engine) as server:
        client = MinerUClient(Served(engine, Script(""), f"{server.url}/v1"))._client
        text = client.predict(encode(PAGE), "\nText Recognition:", params)
        asyncio.run(client.aclose())
        parts = [Part("image", data_url(encode(PAGE))), Part("text", "\nText Recognition:")]
        system = {"role": "system", "content": "You are a helpful assistant."}
        plain = engine.chat(
            {
                "messages": [system, *openai_messages(parts)],
                "max_tokens": 24,
                "temperature": 0,
                "presence_penalty": 1,
                "no_repeat_ngram_size": 100,
                "skip_special_tokens": False,
            }
        )
    assert text == plain.choices[0].message.content != ""


# Docling


def convert(served, *, pdf=False, stoppers=()):
    """Let Docling convert a page to a document."""
    pytest.importorskip("docling.pipeline.vlm_pipeline", reason="docling-slim is not installed")
    from docling.backend.pypdfium2_backend import PyPdfiumDocumentBackend
    from docling.datamodel.base_models import DocumentStream, InputFormat
    from docling.datamodel.pipeline_options import VlmConvertOptions, VlmPipelineOptions
    from docling.datamodel.pipeline_options_vlm_model import ResponseFormat
    from docling.datamodel.stage_model_specs import VlmModelSpec
    from docling.datamodel.vlm_engine_options import ApiVlmEngineOptions
    from docling.document_converter import DocumentConverter, ImageFormatOption, PdfFormatOption
    from docling.pipeline.vlm_pipeline import VlmPipeline

    model = VlmModelSpec(
        name="tiny",
        default_repo_id="tiny",
        prompt="Convert this page to Markdown.",
        response_format=ResponseFormat.MARKDOWN,
        extra_generation_config={"custom_stopping_criteria": list(stoppers)},
    )
    server = ApiVlmEngineOptions(
        url=f"{served.url}/chat/completions", params={"model": "tiny", "skip_special_tokens": False}, timeout=HANG
    )
    vlm_options = VlmConvertOptions(model_spec=model, engine_options=server)
    options = VlmPipelineOptions(enable_remote_services=True, vlm_options=vlm_options)
    common = {"pipeline_cls": VlmPipeline, "pipeline_options": options}
    converter = DocumentConverter(
        format_options={
            InputFormat.PDF: PdfFormatOption(backend=PyPdfiumDocumentBackend, **common),
            InputFormat.IMAGE: ImageFormatOption(**common),
        }
    )
    source = DocumentStream(
        name="page.pdf" if pdf else "page.png", stream=io.BytesIO(encode(PAGE, "PDF" if pdf else "PNG"))
    )
    return converter.convert(source, raises_on_error=False)


MARKDOWN = "# Invoice\n\nTotal: 12.50\n\n- one\n- two"


@pytest.mark.client("docling", "image")
@pytest.mark.client("docling", "usage")
@pytest.mark.parametrize("pdf", [False, True], ids=["image", "PDF"])
def test_docling_converts_a_page(served, pdf):
    served.script.play(MARKDOWN)
    result = convert(served, pdf=pdf)
    assert result.status.value == "success", result.errors
    assert result.document.export_to_markdown() == MARKDOWN
    (tokens,) = received_image_tokens(served)
    assert tokens == count_image_tokens(served, PAGE.resize((620, 880)))
    prediction = result.pages[0].predictions.vlm_response
    assert prediction.num_tokens > tokens


@pytest.mark.client("docling", "errors")
def test_docling_reports_the_servers_error(served):
    served.script.play(WRONG)
    result = convert(served)
    assert result.status.value != "success"
    assert "This is wrong" in result.errors[0].error_message


@pytest.mark.client("docling", "stream")
@pytest.mark.client("docling", "cancel")
def test_docling_stops_a_stream(served):
    pytest.importorskip("docling.pipeline.vlm_pipeline", reason="docling-slim is not installed")
    from docling.models.utils.generation_utils import GenerationStopper

    class AfterTwelve(GenerationStopper):
        def should_stop(self, text: str) -> bool:
            return "12" in text

        def lookback_tokens(self) -> int:
            return 100

    served.script.play(MARKDOWN * 100, delay=0.05)
    result = convert(served, stoppers=[AfterTwelve()])
    assert result.document.export_to_markdown().endswith("Total: 12")
    until(lambda: served.script.running == 0)


# olmOCR

PAGE_TEXT = (
    "---\nprimary_language: en\nis_rotation_valid: True\nrotation_correction: 0\nis_table: False\nis_diagram: False\n"
    "---\nTotal: 12.50"
)


def read_page(served, monkeypatch, **options):
    """Let olmOCR read a page, without poppler, which it starts to render it."""
    pipeline = pytest.importorskip("olmocr.pipeline", reason="olmocr is not installed")
    monkeypatch.setattr(pipeline, "render_pdf_to_base64png", lambda *_, **__: base64.b64encode(encode(PAGE)).decode())
    fields = {"server": served.url, "model": "tiny", "target_longest_image_dim": 440, "guided_decoding": False}
    arguments = argparse.Namespace(**fields | options)
    return asyncio.run(pipeline.try_single_page(arguments, "page.pdf", "page.pdf", 1, attempt=0, rotation=0))


@pytest.mark.client("olmocr", "image")
@pytest.mark.client("olmocr", "usage")
def test_olmocr_reads_a_page(served, monkeypatch):
    served.script.play(PAGE_TEXT)
    page = read_page(served, monkeypatch)
    assert (page.response.natural_text, page.response.primary_language, page.is_valid) == ("Total: 12.50", "en", True)
    assert received_image_tokens(served) == [count_image_tokens(served, PAGE)]
    assert page.input_tokens == len(served.script.requests[0].token_ids)
    assert page.output_tokens > 0


@pytest.mark.client("olmocr", "structured")
def test_olmocr_constrains_the_front_matter(served, monkeypatch):
    served.script.play(PAGE_TEXT)
    assert read_page(served, monkeypatch, guided_decoding=True).response.natural_text == "Total: 12.50"
    assert served.script.requests[0].grammar is not None


@pytest.mark.client("olmocr", "errors")
def test_olmocr_does_not_take_an_error_for_a_page(served, monkeypatch):
    served.script.play(WRONG)
    assert read_page(served, monkeypatch) is None


# LangChain


def load(served, data, **options):
    module = pytest.importorskip("langchain_litellm", reason="langchain-litellm is not installed")
    loader = module.LiteLLMOCRLoader(
        api_base=served.url, model="tiny", bytes_content=data, mode="page", max_retries=0, **options
    )
    return loader.load()


@pytest.mark.client("langchain-ocr", "image")
def test_langchain_loads_the_pages_of_a_pdf(served):
    served.script.play(MARKDOWN)
    pages = load(served, document("One", "Two", size=(84, 84)))
    assert [page.page_content for page in pages] == [MARKDOWN, MARKDOWN]
    assert [page.metadata["page"] for page in pages] == [0, 1]
    assert pages[0].metadata["width"] == 168
    part = {"type": "file", "file": {"file_data": data_url(document("One", size=(84, 84)), "application/pdf")}}
    served.engine.chat({"messages": [{"role": "user", "content": [part]}]})
    assert len(set(received_image_tokens(served))) == 1


@pytest.mark.client("langchain-ocr", "errors")
def test_langchain_reports_the_servers_error(served):
    served.script.play(WRONG)
    with pytest.raises(RuntimeError, match="This is wrong"):
        load(served, document("One", size=(84, 84)))
