"""`POST /v1/ocr`: Mistral's format, pages in order, failures in their place, and what ends a request."""

from __future__ import annotations

import base64
import io
import json
import socket
import threading

import numpy as np
import pytest
from PIL import Image

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.engine.ocr import to_markdown
from dashinfer_vlm_core.errors import DecoderFailed
from dashinfer_vlm_core.models.ocr_prompts import OcrPrompt
from dashinfer_vlm_core.testing import Script, scripted_registry
from dashinfer_vlm_server.endpoints import ocr as endpoint
from tests.cases import cases
from tests.pdfs import document, encrypted, rendered
from tests.samples import data_url, encode, noise
from tests.server.conftest import Scripted, serving
from tests.server.test_disconnect import LONG
from tests.waiting import HANG, NEVER, until

PDF = "application/pdf"
SIZE = (84, 84)
"""In points. Pages have 168 x 168 pixels by default."""
THREE = document("One", "Two", "Three", size=SIZE)
BROKEN = THREE.replace(b"/MediaBox [0 0 84 84]", b"/MediaBox [0 0 84 99999]", 1)
"""The first page is larger than a page can be."""
THIN = THREE.replace(b"/MediaBox [0 0 84 84]", b"/MediaBox [0 0 60 14400]", 1)
"""The first page has an aspect ratio that an image cannot have."""


@pytest.fixture(scope="module")
def refusing(tiny_checkpoint):
    """A server for requests that fail before the decoder."""
    script = Script("Yes.")
    config = EngineConfig(model=str(tiny_checkpoint), served_model_name="tiny", decoder="scripted")
    with Engine(config, registry=scripted_registry(script)) as engine, serving(engine) as server:
        yield Scripted(server, engine, script)


def post(served, data=THREE, *, kind=PDF, options=None, **fields):
    with served.server.http() as client:
        source = {"type": "document_url", "document_url": data_url(data, kind), **(options or {})}
        return client.post("/v1/ocr", json={"document": source, **fields})


def events(response):
    *lines, end = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [json.loads(line) for line in lines], end


def test_response_has_mistrals_format(scripted):
    served = scripted("# Title\n\nText.")
    assert post(served).json() == {
        "pages": [
            {
                "index": index,
                "markdown": "# Title\n\nText.",
                "images": [],
                "dimensions": {"dpi": 144, "height": 168, "width": 168},
                "error": None,
            }
            for index in range(3)
        ],
        "model": "tiny",
        "document_annotation": None,
        "usage_info": {"pages_processed": 3, "doc_size_bytes": len(THREE)},
    }


def test_pages_are_sent_in_order_although_later_ones_end_earlier(scripted):
    received = []

    def respond(request):
        received.append(float(request.spans[0].tokens.embedding.sum()))
        return "Long text. " * 30 if received[-1] == received[0] else "Short."

    served = scripted(respond, delay=0.001)
    post(served, pages=[0])
    chunks, _ = events(post(served, stream=True))
    assert [(chunk["page"]["index"], chunk["page"]["markdown"][:5]) for chunk in chunks] == [
        (0, "Long "), (1, "Short"), (2, "Short")
    ]  # fmt: skip


def test_page_is_the_image_of_a_chat_request_with_the_models_prompt(scripted):
    served = scripted("Yes.", ocr_prompt="Read it.")
    post(served, pages=[1])
    part = {"type": "file", "file": {"file_data": data_url(THREE, PDF), "pages": "2", "render": "image"}}
    served.engine.chat({"messages": [{"role": "user", "content": [part, {"type": "text", "text": "Read it."}]}]})
    ours, theirs = served.script.requests
    assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    np.testing.assert_array_equal(ours.spans[0].tokens.embedding, theirs.spans[0].tokens.embedding)
    assert ours.sampling.temperature == 0


@pytest.mark.parametrize(("pages", "indices"), [([2, 0], [0, 2]), ("1-2", [1, 2]), ("0, 2", [0, 2]), (None, [0, 1, 2])])
def test_pages_are_selected_from_zero_on(scripted, pages, indices):
    assert [page["index"] for page in post(scripted("Yes."), pages=pages).json()["pages"]] == indices


@pytest.mark.parametrize(
    ("file", "failures", "code", "message"),
    [
        (BROKEN, [], "media_too_large", "Page 1 of the document has 84 x 99999 points."),
        (THIN, [], "invalid_value", "Page 1: One side of 120 x 28800 pixels is more than 200 times the other"),
        (THREE, [DecoderFailed("The decoder died.")], "decoder_failed", "The decoder died."),
    ],
    ids=["too large", "thin", "decoder"],
)
def test_page_that_fails_is_reported_in_its_place(scripted, file, failures, code, message):
    found = post(scripted(*failures, "Yes.", max_batch_size=2), file).json()
    first, *others = found["pages"]
    assert (first["markdown"], [page["markdown"] for page in others]) == ("", ["Yes.", "Yes."])
    assert first["error"]["code"] == code
    assert first["error"]["message"].startswith(message)
    assert found["usage_info"]["pages_processed"] == 2
    if not failures:
        assert first["dimensions"] is None
        assert first["error"]["param"] == "document"


@pytest.mark.parametrize("stream", [False, True])
def test_error_of_all_pages_is_that_of_the_request(scripted, stream):
    response = post(scripted(DecoderFailed("The decoder died.")), stream=stream)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "decoder_failed")


def test_text_that_does_not_end_is_marked(scripted):
    served = scripted("word " * 500, max_model_len=300)
    (page,) = post(served, pages=[0]).json()["pages"]
    assert page["markdown"].startswith("word word")
    assert page["error"]["code"] == "incomplete_page"


def test_stream_has_an_event_for_each_page(scripted):
    response = post(scripted("Yes."), BROKEN, stream=True)
    chunks, end = events(response)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert end == "[DONE]"
    assert [chunk["page"]["index"] for chunk in chunks] == [0, 1, 2]
    assert [chunk["usage_info"]["pages_processed"] for chunk in chunks] == [0, 1, 2]
    assert {(chunk["object"], chunk["model"], chunk["total_pages"]) for chunk in chunks} == {("ocr.page", "tiny", 3)}


def test_image_of_a_page_is_what_the_model_receives(scripted):
    (page,) = post(scripted("Yes."), pages=[2], include_image_base64=True).json()["pages"]
    (image,) = page["images"]
    assert (image["bottom_right_x"], image["bottom_right_y"]) == (168, 168)
    png = base64.b64decode(image["image_base64"].removeprefix("data:image/png;base64,"))
    expected = np.asarray(rendered(document("Three", size=SIZE), 168, 168), np.int16)
    shown = np.asarray(Image.open(io.BytesIO(png)), np.int16)
    assert abs(shown - expected).max() <= 2  # patches are normalized and converted back


@pytest.mark.parametrize("field", ["image_url", "object", "document_url"])
def test_images_are_documents_of_one_page(scripted, field):
    url = data_url(encode(noise(84, 112)))
    source = {
        "image_url": {"type": "image_url", "image_url": url},
        "object": {"image_url": {"url": url, "detail": "high"}},
        "document_url": {"type": "document_url", "document_url": url},
    }[field]
    with scripted("Yes.").server.http() as client:
        found = client.post("/v1/ocr", json={"model": "tiny", "document": source}).json()
    (page,) = found["pages"]
    assert (page["markdown"], page["dimensions"]) == ("Yes.", {"dpi": 72, "height": 84, "width": 112})
    assert found["usage_info"] == {"pages_processed": 1, "doc_size_bytes": None}


def test_options_of_a_pdf_apply(scripted):
    served = scripted("Yes.")
    (page,) = post(served, pages=[0], options={"dpi": 72}).json()["pages"]
    assert page["dimensions"] == {"dpi": 72, "height": 84, "width": 84}
    assert post(served, encrypted("secret"), options={"password": "secret"}).status_code == 200


@cases(
    ("fields", "param", "message"),
    [
        ({"pages": [3]}, "pages", "selects page 3, but the document has 3. Choose from 0 to 2."),
        ({"pages": "2-1"}, "pages", 'must be page numbers and ranges from 0 on, such as "0-2,6"'),
        ({"document": {}}, "document", "must have either a `document_url` or an `image_url`"),
        ({"document": {"type": "file", "file_id": "x"}}, "document.file_id", "files are not stored"),
        ({"document": {"document_url": "https://a.org/b.mp4"}}, "document.document_url", "is a video"),
        ({"document": {"document_url": "https://a.org/b.docx"}}, "document.document_url", "a PDF"),
        ({"document": {"image_url": data_url(b"?"), "dpi": 72}}, "document.dpi", "is not available for an image"),
        ({"document": {"image_url": data_url(b"?")}, "pages": [1]}, "pages", "an image has one page"),
        ({"document": {"image_url": data_url(b"?")}, "pages": "0-1"}, "pages", "an image has one page"),
        ({"document": {"image_url": data_url(b"?")}, "pages": "0-0,0"}, "document", "not a complete PNG"),
        ({"document": {"image_url": data_url(b"?")}}, "document", "not a complete PNG"),
        ({"document": {"document_url": data_url(b"?", PDF)}}, "document", "not a complete PDF"),
        ({"document": {"document_url": data_url(encrypted("a"), PDF)}}, "document.password", "is encrypted"),
        ({"document": {"document_url": "file:///etc/x.pdf"}}, "document", "local"),
        ({"document": {"document_url": data_url(THREE, PDF), "dpi": 999}}, "document.dpi", "Lower it"),
        ({"document_annotation_format": {"type": "json_schema"}}, "document_annotation_format", "response_format"),
        ({"table_format": "html"}, "table_format", "The model chooses"),
        ({"extract_header": True}, "extract_header", "Remove it"),
        ({"image_limit": 3}, "image_limit", "Figures are not cut out"),
        ({"include_blocks": True}, "include_blocks", "Markdown only"),
        ({"pagess": [0]}, "pagess", "Did you mean `pages`?"),
    ],
)
def test_errors_name_the_field(refusing, fields, param, message):
    with refusing.server.http() as client:
        body = {"document": {"document_url": data_url(THREE, PDF)}, **fields}
        response = client.post("/v1/ocr", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]
    assert "messages[0]" not in error["message"]


def test_fields_without_effect_are_accepted_and_unknown_models_are_not(refusing):
    neutral = {"id": "x", "extract_header": False, "include_blocks": False, "table_format": None}
    assert post(refusing, **neutral).status_code == 200
    response = post(refusing, model="mistral-ocr-latest")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_documents_fill_at_most_half_of_a_batch(scripted):
    running = []
    served = scripted(lambda _: running.append(served.script.running) or "Yes.", delay=0.02, max_batch_size=4)
    assert len(post(served, document(*"abcdefgh", size=SIZE)).json()["pages"]) == 8
    assert max(running) == 1  # besides the page that is about to start


def test_page_waits_while_the_queue_is_full(scripted):
    served = scripted("Yes.", max_batch_size=1, max_waiting=0)
    assert len(post(served).json()["pages"]) == 3
    ready = served.engine._ready()
    for limiter in (ready.pipeline.limiter, ready.ocr.limiter):
        limiter.in_use = limiter.limit
        response = post(served)
        limiter.in_use = 0
        assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")


def test_comments_keep_a_stream_open_between_pages(scripted, monkeypatch):
    monkeypatch.setattr(endpoint, "COMMENT_SECONDS", 0.01)
    gates = [threading.Event() for _ in range(3)]
    waiting = iter(gates)
    served = scripted(lambda _: next(waiting).wait(HANG) and "Yes.", max_batch_size=2)  # page by page
    body = {"document": {"document_url": data_url(THREE, PDF)}, "stream": True}
    with served.server.http() as client, client.stream("POST", "/v1/ocr", json=body) as response:
        lines = response.iter_lines()
        for count, gate in enumerate(gates, 1):
            assert ": converting pages" in lines
            gate.set()
            event = next(line for line in lines if line.startswith("data: "))
            assert json.loads(event.removeprefix("data: "))["usage_info"]["pages_processed"] == count
        assert "data: [DONE]" in lines


def test_page_that_does_not_fit_the_context_names_the_limit_that_fits(scripted):
    served = scripted("Yes.", max_model_len=185)
    error = post(served).json()["error"]
    tokens = (SIZE[0] * 2 // 28) ** 2
    assert (error["param"], error["code"]) == ("document", "context_length_exceeded")
    assert error["message"].startswith(f"Page 1 has {tokens} tokens, but only ")
    pixels = int(error["message"].partition("set `max_pixels` to ")[2].partition(" ")[0])
    assert post(served, options={"max_pixels": pixels}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_cancels_all_pages(scripted, stream):
    served = scripted(LONG, delay=NEVER, max_batch_size=6)
    body = json.dumps({"document": {"document_url": data_url(THREE, PDF)}, "stream": stream}).encode()
    head = b"POST /v1/ocr HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.server.port)) as connection:
        connection.sendall(head % len(body) + body)
        until(lambda: served.script.running == 3)
    until(lambda: served.script.running == 0)


@cases(
    ("text", "front_matter", "markdown"),
    [
        ("---\nis_table: False\n---\n# Title\n", True, "# Title"),
        ("---\nis_table: False\n---", True, ""),
        ("---\na: b\n---\nText", False, "---\na: b\n---\nText"),
        ("```markdown\n# Title\n```", False, "# Title"),
        ("```python\nprint()\n```", False, "```python\nprint()\n```"),
        ("Text\n```html\nx\n```", False, "Text\n```html\nx\n```"),
    ],
)
def test_metadata_and_fences_are_left_out(text, front_matter, markdown):
    assert to_markdown(text, OcrPrompt(text="", has_front_matter=front_matter)) == markdown
