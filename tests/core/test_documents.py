"""Documents through the whole engine: what the model receives of a PDF, and what is refused."""

from __future__ import annotations

import asyncio
import functools

import numpy as np
import pypdfium2
import pytest

from dashinfer_vlm_core import VLM, Engine, EngineConfig
from dashinfer_vlm_core.errors import (
    ContextLengthExceeded,
    InvalidParameter,
    MediaUndecodable,
    UnsupportedParameter,
)
from dashinfer_vlm_core.testing import Script, scripted_registry
from tests.pdfs import document
from tests.samples import data_url, encode

PART = "messages[0].content[0]"
LINES = "Invoice 17\nTotal: 42.00"
BOX = "0.2 0.5 0.9 rg 20 10 50 30 re f"
SIZE = (84, 84)
"""In points, and at 72 dots per inch in pixels: the smallest size of an image. The largest is twice as large."""
FILE = document(LINES, "Second page", size=SIZE, paint=BOX)


@pytest.fixture(scope="module")
def send(tiny_checkpoint):
    """Send content parts to an engine with a scripted decoder; return what the decoder received, and the response."""
    script = Script("Fine.")
    config = EngineConfig(model=str(tiny_checkpoint), decoder="scripted")
    with Engine(config, registry=scripted_registry(script)) as engine:

        def send(*content, **fields):
            response = engine.chat({"messages": [{"role": "user", "content": list(content)}], **fields})
            return script.requests[-1], response

        yield send


def file(data=FILE, **options):
    return {"type": "file", "file": {"file_data": data_url(data, "application/pdf"), **options}}


def text(words):
    return {"type": "text", "text": words}


def image(picture, **options):
    return {"type": "image_url", "image_url": {"url": data_url(encode(picture)), **options}}


def rendered(number, scale, data=FILE):
    with pypdfium2.PdfDocument(data) as opened:
        return opened[number - 1].render(scale=scale).to_pil()


def text_layer(number, data=FILE):
    with pypdfium2.PdfDocument(data) as opened:
        return opened[number - 1].get_textpage().get_text_bounded()


def assert_same_prompt(ours, theirs):
    assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    np.testing.assert_array_equal(ours.positions, theirs.positions)
    for span, other in zip(ours.spans, theirs.spans, strict=True):
        assert (span.start, span.row, span.length) == (other.start, other.row, other.length)
        np.testing.assert_array_equal(span.tokens.embedding, other.tokens.embedding)


@pytest.mark.parametrize("dpi", [72, 144])
def test_page_equals_its_text_and_the_same_page_as_png(send, dpi):
    ours, response = send(file(pages="1", dpi=dpi), text("What?"))
    theirs, expected = send(text(text_layer(1) + "\n"), image(rendered(1, dpi / 72)), text("What?"))
    assert_same_prompt(ours, theirs)
    assert response.usage == expected.usage
    assert response.usage.prompt_tokens_details.image_tokens > 0
    assert "Total: 42.00" in text_layer(1)


def test_page_is_rendered_at_the_size_that_max_pixels_allows(send):
    ours, _ = send(file(pages="1", render="image", max_pixels=84 * 84))
    theirs, _ = send(image(rendered(1, 1)))
    assert_same_prompt(ours, theirs)
    request_wide, _ = send(file(pages="1", render="image"), mm_processor_kwargs={"max_pixels": 84 * 84})
    assert_same_prompt(request_wide, theirs)


def test_size_below_the_minimum_names_what_a_file_can_set(send):
    with pytest.raises(InvalidParameter, match=r"Set `max_pixels` to at least 7056\.$") as caught:
        send(file(max_pixels=100))
    assert caught.value.param == f"{PART}.file.max_pixels"
    with pytest.raises(InvalidParameter, match=r"Lower the minimum in `mm_processor_kwargs`\.$") as caught:
        send(file(), mm_processor_kwargs={"min_pixels": 10**9})
    assert caught.value.param == f"{PART}.file"
    assert send(file(pages="1", max_pixels=84 * 84))


def test_error_of_a_page_names_it(send):
    with pytest.raises(InvalidParameter, match=r"^Page 1: One side of 120 x 28800 pixels") as caught:
        send(file(FILE.replace(b"/MediaBox [0 0 84 84]", b"/MediaBox [0 0 60 14400]", 1)))
    assert caught.value.param == PART


def test_pages_are_numbered_and_in_order(send):
    one, two = (rendered(number, 1) for number in (1, 2))
    ours, _ = send(file(dpi=72), text("?"))
    theirs, _ = send(
        text(f"Page 1:\n{text_layer(1)}\n"), image(one), text(f"Page 2:\n{text_layer(2)}\n"), image(two), text("?")
    )
    assert_same_prompt(ours, theirs)
    assert_same_prompt(send(file(dpi=72, pages="2, 1"), text("?"))[0], theirs)


def test_text_only_and_image_only(send):
    words, response = send(file(pages="2", render="text"))
    assert_same_prompt(words, send(text(text_layer(2) + "\n"))[0])
    assert response.usage.prompt_tokens_details.image_tokens == 0
    assert_same_prompt(send(file(render="image", pages="2", dpi=72))[0], send(image(rendered(2, 1)))[0])


def test_page_without_text_layer_is_an_image(send):
    scan = document("", size=SIZE, paint=BOX)
    assert_same_prompt(send(file(scan, dpi=72))[0], send(image(rendered(1, 1, scan)))[0])
    with pytest.raises(InvalidParameter, match="no text layer") as caught:
        send(file(scan, render="text"))
    assert caught.value.param == f"{PART}.file.render"


def test_documents_next_to_other_parts_keep_the_paths_of_errors(send):
    ours, _ = send(text("a"), file(dpi=72), image(rendered(2, 1)), file(pages="1", dpi=72), text("b"))
    assert len(ours.spans) == 4
    with pytest.raises(InvalidParameter) as caught:
        send(file(), image(rendered(2, 1)), image(np.zeros((1, 50, 3), np.uint8)))
    assert caught.value.param == "messages[0].content[2]"


def test_tool_results_can_be_documents(send):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [file(pages="1", dpi=72)]},
    ]
    ours, _ = send(messages=messages)
    messages[2]["content"] = [text(text_layer(1) + "\n"), image(rendered(1, 1))]
    assert_same_prompt(ours, send(messages=messages)[0])


def test_preview_and_tokenize_take_documents(tiny_checkpoint):
    request = {"messages": [{"role": "user", "content": [file(), text("What?")]}]}
    script = Script("Fine.")
    config = EngineConfig(model=str(tiny_checkpoint), decoder="scripted")
    with Engine(config, registry=scripted_registry(script)) as engine:
        preview = engine.preview(request)
        assert len(preview.items) == 2
        tokens = engine.chat(request).usage.prompt_tokens
        assert preview.prompt_tokens == len(asyncio.run(engine.atokenize(request))) == tokens


def test_cached_page_is_not_rendered_again(tiny_checkpoint, monkeypatch):
    script = Script("Fine.")
    config = EngineConfig(model=str(tiny_checkpoint), decoder="scripted")

    with Engine(config, registry=scripted_registry(script)) as engine:

        def chat(data=FILE, **options):
            engine.chat({"messages": [{"role": "user", "content": [file(data, **options), text("?")]}]})
            return script.requests[-1]

        executor = engine._ready().pipeline.inputs.media_executor
        process, pages = executor.process, []
        monkeypatch.setattr(executor, "process", lambda *args, **budget: pages.append(args) or process(*args, **budget))
        first = chat()
        assert len(pages) == 2
        assert_same_prompt(first, chat(pages="2,1"))
        assert len(pages) == 2
        chat(max_pixels=84 * 84)
        assert len(pages) == 4
        other = chat(document(LINES, size=SIZE))  # the same text, without the box
        assert len(pages) == 5
        assert not np.array_equal(other.spans[0].tokens.embedding, first.spans[0].tokens.embedding)


def test_vlm_takes_paths_and_bytes(tiny_checkpoint, tmp_path):
    path = tmp_path / "report.pdf"
    path.write_bytes(FILE)
    script = Script("Fine.")
    engine = Engine(EngineConfig(model=str(tiny_checkpoint), decoder="scripted", allowed_local_media_path=tmp_path),
                    registry=scripted_registry(script))  # fmt: skip
    with engine, VLM(engine=engine) as vlm:
        for source in ({"file_data": FILE}, {"file_url": path}, {"file_url": str(path)}):
            part = {"type": "file", "file": {**source, "pages": "1"}}
            (output,) = vlm.chat([{"role": "user", "content": [part]}], use_tqdm=False)
            assert output.outputs[0].text == "Fine."
        ours, *others = script.requests
        for other in others:
            assert_same_prompt(ours, other)
        bad = {"type": "file", "file": {"file_data": b"no PDF", "filename": "a.pdf"}}
        with pytest.raises(MediaUndecodable, match="not a complete PDF"):
            vlm.chat([{"role": "user", "content": [bad]}], use_tqdm=False)


@pytest.mark.slow
@pytest.mark.supports("documents", backend="torch-cpu")
def test_completion_of_a_page_equals_that_of_the_same_page_as_png():
    page = document("", size=SIZE, paint="1 0 0 rg 20 20 44 44 re f")
    with Engine(EngineConfig(model="demo")) as engine:
        answers = [
            engine.chat(
                {"messages": [{"role": "user", "content": [part, text("Describe the picture.")]}], "temperature": 0}
            )
            for part in (file(page), image(rendered(1, 2, page)))
        ]
    ours, theirs = (answer.choices[0].message.content for answer in answers)
    assert ours == theirs
    assert "red square" in ours


def test_documents_need_media_workers(tiny_checkpoint):
    config = EngineConfig(model=str(tiny_checkpoint), decoder="scripted", media_workers=0)
    with Engine(config, registry=scripted_registry(Script("Fine."))) as engine:
        with pytest.raises(UnsupportedParameter, match="without `media_workers=0`") as caught:
            engine.chat({"messages": [{"role": "user", "content": [file()]}]})
        assert caught.value.param == PART


def test_replaced_fonts_are_named_in_the_log(send, caplog):
    for text, font, render in (("A", "One", "both"), ("B", "Helvetica", "both"), ("C", "Two", "image")):
        send(file(document(text, size=SIZE, font=font), render=render))
    messages = [record.getMessage() for record in caplog.records]
    prefix = f"{PART}: dashinfer_vlm_core.media.pdf: Fonts that are not in the document were replaced:"
    assert messages == [f"{prefix} One", f"{prefix} Two"]


@functools.cache
def boxes(count):
    return document(*[f"Page {number}" for number in range(count)], size=SIZE)


def test_prompt_that_does_not_fit_names_tokens_pages_and_max_pixels(tiny_checkpoint):
    script = Script("Fine.")
    config = EngineConfig(model=str(tiny_checkpoint), decoder="scripted", max_model_len=400)
    with Engine(config, registry=scripted_registry(script)) as engine:

        def chat(**options):
            engine.chat({"messages": [{"role": "user", "content": [file(boxes(8), **options)]}], "max_tokens": 40})

        with pytest.raises(ContextLengthExceeded) as caught:
            chat()
        assert caught.value.param == f"{PART}.file"
        tokens, fitting, pixels = (
            int(word)
            for word in caught.value.message.replace(",", "").split()
            if word.isdigit() and word not in ("8", "40", "400")
        )
        assert caught.value.prompt_tokens == tokens
        chat(pages=f"1-{fitting}")
        chat(max_pixels=pixels)
        with pytest.raises(ContextLengthExceeded):
            chat(pages=f"1-{fitting + 1}")
