"""OCR in Python: the prompt of a checkpoint, `Engine.ocr` and `VLM.ocr`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dashinfer_vlm_core import VLM
from dashinfer_vlm_core.engine.ocr import to_markdown
from dashinfer_vlm_core.engine.remote import RemoteEngine
from dashinfer_vlm_core.errors import MediaUnreachable, UnsupportedParameter
from dashinfer_vlm_core.models.model_card import ModelCard
from dashinfer_vlm_core.models.ocr_prompts import OcrPrompt, find_ocr_prompt
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_core.testing import scripted_engine
from tests.cases import cases
from tests.pdfs import document
from tests.server.conftest import serving


@pytest.mark.parametrize(
    ("model", "folder", "model_type", "text"),
    [
        ("allenai/olmOCR-2-7B-1025", "/hub/models--allenai--olmOCR-2-7B-1025/snapshots/1", "qwen2_5_vl", "Attached is"),
        ("/hub/models--allenai--olmOCR-2-7B-1025/snapshots/1", None, "qwen2_5_vl", "Attached is"),
        ("/models/Nanonets-OCR-s", None, "qwen2_5_vl", "Extract the text from the above document"),
        ("datalab-to/chandra", "/cache/1", "qwen3_vl", "OCR this image to HTML."),
        ("datalab-to/chandra-ocr-2", "/cache/1", "qwen3_5", "OCR this image to HTML."),
        ("opendatalab/MinerU2.5-2509-1.2B", "/cache/1", "qwen2_vl", "\nText Recognition:"),
        ("/home/chandra/Qwen3-VL-4B-Instruct", None, "qwen3_vl", "qwenvl markdown"),
        ("Qwen/Qwen2.5-VL-3B-Instruct", "/cache/1", "qwen2_5_vl", "Transcribe this page as Markdown"),
    ],
)
def test_prompt_follows_from_the_checkpoints_name_and_type(tiny_checkpoint, model, folder, model_type, text):
    spec = replace(
        load_plugins().load_spec(tiny_checkpoint), folder=Path(folder or model), model_type=model_type, card=ModelCard()
    )
    assert find_ocr_prompt(model, spec).text.startswith(text)


def test_chandras_versions_have_their_prompts(tiny_checkpoint):
    spec = load_plugins().load_spec(tiny_checkpoint)
    first, second = (find_ocr_prompt(name, spec).text for name in ("chandra", "chandra-ocr-2"))
    assert "SMILES" not in first
    assert "SMILES" in second


def test_model_of_a_plugin_has_its_example_prompt():
    registry = load_plugins()
    assert find_ocr_prompt("demo", registry.load_spec(registry.models["demo"])).text == "Describe the picture."


PAGES = [
    ("```markdown\n# A\n```", "# A"),
    (" ```md\n# A\n```python\n1\n```\n```\n", "# A\n```python\n1\n```"),
    ("```html\nA\n```\nB\n```html\nC\n```", None),
    ("```markdown\nA\n```python\n1\n```", None),
    ("```python\n1\n```", None),
]


@cases(("text", "markdown"), PAGES)
def test_only_a_fence_around_a_page_is_removed(text, markdown):
    assert to_markdown(text, OcrPrompt(text="")) == (markdown or text)


def test_vlm_reads_a_file_and_engines_yield_pages(tiny_checkpoint, tmp_path):
    path = tmp_path / "report.pdf"
    path.write_bytes(document("One", "Two", size=(84, 84)))
    engine = scripted_engine("# Page", model=str(tiny_checkpoint), allowed_local_media_path=tmp_path)
    with engine, VLM(engine=engine) as vlm:
        assert [(page.index, page.markdown) for page in vlm.ocr(path)] == [(0, "# Page"), (1, "# Page")]
        (page,) = vlm.ocr(path, pages=[1], dpi=72)
        assert (page.index, page.dimensions.width) == (1, 84)
        chunk = next(engine.ocr({"document": {"document_url": str(path)}}))
        assert (chunk.page.index, chunk.total_pages) == (0, 2)
        with pytest.raises(MediaUnreachable):
            vlm.ocr(tmp_path / "missing.pdf")


def test_server_without_ocr_is_an_error(tiny_checkpoint):
    engine = scripted_engine("Yes.", model=str(tiny_checkpoint))
    with (
        engine,
        serving(engine) as server,
        RemoteEngine(f"{server.url}/other/v1") as remote,
        pytest.raises(UnsupportedParameter, match="has no `/v1/ocr`"),
    ):
        next(remote.ocr({"document": {"document_url": "https://a.org/b.pdf"}}))
