"""Bad requests over HTTP: each error names the field, and the next valid request succeeds."""

from __future__ import annotations

import base64

import pytest
from PIL import Image

from benchmarks.hostile_documents import CATALOG, pdf
from tests.cases import cases
from tests.pdfs import document, encrypted
from tests.samples import data_url, encode, encode_video, image_url, noise

GOOD = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


def with_content(content, role="user"):
    return {"messages": [{"role": role, "content": content}]}


def with_image(url, **options):
    return with_content([{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": url, **options}}])


def with_video(url, **options):
    return with_content([{"type": "video_url", "video_url": {"url": url, **options}}])


def with_file(data, **options):
    return with_content([{"type": "file", "file": {"file_data": data_url(data, "application/pdf"), **options}}])


def blank(width, height):
    return data_url(encode(Image.new("RGB", (width, height))))


IMAGE = image_url()
PAGES = document("One", "Two", "Three", "Four")
FILE = "messages[0].content[0].file"
PART = "messages[0].content[1]"
FIRST_PART = "messages[0].content[0]"
TOOL = {"type": "function", "function": {"name": "f"}}
DEEP: dict = {}
for _ in range(40):
    DEEP = {"items": DEEP}


def with_schema(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}}


# Name: (fields to change in a valid request, or a complete body; the field that the error names)
BAD = {
    # The conversation
    "no messages": ({"messages": None}, "messages"),
    "messages is empty": ({"messages": []}, "messages"),
    "messages is a string": ({"messages": "Hello"}, "messages"),
    "a message is a string": ({"messages": ["Hello"]}, "messages[0]"),
    "no role": ({"messages": [{"content": "Hello"}]}, "messages[0].role"),
    "unknown role": (with_content("Hello", role="robot"), "messages[0].role"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "content is a number": (with_content(1), "messages[0].content"),
    "content has no parts": (with_content([]), "messages[0].content"),
    "the second message is wrong": (
        {"messages": [{"role": "user", "content": "Hello"}, {"role": "user", "content": 1}]},
        "messages[1].content",
    ),
    "half a surrogate pair": (r'{"messages": [{"role": "user", "content": "\ud83d"}]}', "messages[0].content"),
    "a part without type": (with_content([{"text": "Hello"}]), "messages[0].content[0].type"),
    "a part of unknown type": (with_content([{"type": "smell"}]), "messages[0].content[0].type"),
    "a text part without text": (with_content([{"type": "text"}]), "messages[0].content[0].text"),
    "an image in a system message": (
        with_content([{"type": "image_url", "image_url": {"url": IMAGE}}], role="system"),
        "messages[0].content[0]",
    ),
    "audio in a part": (
        with_content([{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]),
        "messages[0].content[0].type",
    ),
    # Unsupported features
    "unknown model": ({"model": "gpt-4o"}, "model"),
    "model is a number": ({"model": 4}, "model"),
    "zero choices": ({"n": 0}, "n"),
    "a thousand choices": ({"n": 1000}, "n"),
    "tools of another type": ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    "a tool without a name": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    "a tool twice": ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    "a choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "a choice that is not a tool": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
    ),
    "a schema that is too deep": (with_schema(DEEP), "response_format.json_schema.schema"),
    "an invalid schema": (with_schema({"type": "strin"}), "response_format.json_schema.schema"),
    "an invalid pattern": (with_schema({"pattern": "(("}), "response_format.json_schema.schema"),
    "a format without a schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
    ),
    "audio": ({"modalities": ["text", "audio"]}, "modalities"),
    "reasoning": ({"reasoning_effort": "high"}, "reasoning_effort"),
    "a chat template": ({"chat_template": "{{ messages }}"}, "chat_template"),
    "storage": ({"store": True}, "store"),
    "a misspelled field": ({"max_token": 5}, "max_token"),
    "an invalid regular expression": ({"guided_regex": "(("}, "guided_regex"),
    "two formats": ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
    "coordinates without an image": ({"coordinates": "original"}, "coordinates"),
    # Numbers
    "temperature too high": ({"temperature": 2.1}, "temperature"),
    "temperature negative": ({"temperature": -0.1}, "temperature"),
    "temperature a string": ({"temperature": "1"}, "temperature"),
    "temperature a boolean": ({"temperature": True}, "temperature"),
    "temperature beyond floats": (
        '{"messages": [{"role": "user", "content": "Hello"}], "temperature": 1e309}',
        "temperature",
    ),
    "top_p negative": ({"top_p": -0.1}, "top_p"),
    "top_p too high": ({"top_p": 1.01}, "top_p"),
    "top_k too low": ({"top_k": -2}, "top_k"),
    "top_k not whole": ({"top_k": 1.5}, "top_k"),
    "min_p too high": ({"min_p": 1.1}, "min_p"),
    "max_tokens zero": ({"max_tokens": 0}, "max_tokens"),
    "max_tokens negative": ({"max_tokens": -1}, "max_tokens"),
    "max_tokens huge": ({"max_tokens": 10**30}, "max_tokens"),
    "max_tokens a boolean": ({"max_tokens": True}, "max_tokens"),
    "max_tokens twice": ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    "max_tokens beyond the context": ({"max_tokens": 100_000}, "max_tokens"),
    "min_tokens above max_tokens": ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    "frequency_penalty too high": ({"frequency_penalty": 2.5}, "frequency_penalty"),
    "presence_penalty too low": ({"presence_penalty": -2.5}, "presence_penalty"),
    "repetition_penalty zero": ({"repetition_penalty": 0}, "repetition_penalty"),
    "seed a float": ({"seed": 0.5}, "seed"),
    "seed too long": ({"seed": 2**63}, "seed"),
    "top_logprobs too many": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs"),
    "logprobs a number": ({"logprobs": 1}, "logprobs"),
    "logit_bias too strong": ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    "logit_bias of a word": ({"logit_bias": {"red": 1}}, "logit_bias"),
    "logit_bias beyond the vocabulary": ({"logit_bias": {"320": 1}}, "logit_bias"),
    "stop_token_ids beyond the vocabulary": ({"stop_token_ids": [320]}, "stop_token_ids"),
    "stop empty": ({"stop": ""}, "stop"),
    "stop too many": ({"stop": ["a"] * 17}, "stop"),
    "stop a number": ({"stop": 1}, "stop"),
    "stream a string": ({"stream": "yes"}, "stream"),
    "stream_options alone": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "stream_options a list": ({"stream": True, "stream_options": []}, "stream_options"),
    # Images
    "image_url a list": (with_content([{"type": "image_url", "image_url": [IMAGE]}]), f"{FIRST_PART}.image_url"),
    "image_url empty": (with_image(""), f"{PART}.image_url.url"),
    "image_url a number": (with_image(1), f"{PART}.image_url.url"),
    "unknown detail": (with_image(IMAGE, detail="most"), f"{PART}.image_url.detail"),
    "max_pixels zero": (with_image(IMAGE, max_pixels=0), f"{PART}.image_url.max_pixels"),
    "min_pixels above max_pixels": (
        with_image(IMAGE, min_pixels=9000, max_pixels=8000),
        f"{PART}.image_url.min_pixels",
    ),
    "bad base64": (with_image("data:image/png;base64,@@@"), PART),
    "a data URL without a comma": (with_image("data:image/png;base64"), PART),
    "not an image": (with_image(data_url(b"hello, I am text")), PART),
    "half an image": (with_image(data_url(encode(Image.new("RGB", (64, 64)), "JPEG")[:200])), PART),
    "a file": (with_image("file:///etc/passwd"), PART),
    "a path": (with_image("/etc/passwd"), PART),
    "a private address": (with_image("http://10.0.0.1/a.png"), PART),
    "this machine": (with_image("http://127.0.0.1:9/a.png"), PART),
    "this machine in disguise": (with_image("http://2130706433/a.png"), PART),
    "another scheme": (with_image("ftp://example.com/a.png"), PART),
    "one pixel": (with_image(blank(1, 1)), PART),
    "a line": (with_image(blank(402, 2)), PART),
    "too many pixels": (with_image(blank(2000, 2000)), PART),
    "too many images": (
        with_content([{"type": "image_url", "image_url": {"url": IMAGE}}] * 4),
        "messages[0].content[3]",
    ),
    # Videos
    "video_url a number": (with_content([{"type": "video_url", "video_url": 5}]), f"{FIRST_PART}.video_url"),
    "input_video without data": (
        with_content([{"type": "input_video", "input_video": {}}]),
        f"{FIRST_PART}.input_video.url",
    ),
    "input_video not base64": (with_content([{"type": "input_video", "input_video": {"data": "!"}}]), FIRST_PART),
    "no frames": (with_video([]), f"{FIRST_PART}.video_url.url"),
    "a frame is a number": (with_video([IMAGE, 1]), f"{FIRST_PART}.video_url.url[1]"),
    "fps zero": (with_video([IMAGE] * 2, fps=0), f"{FIRST_PART}.video_url.fps"),
    "fps and num_frames": (
        with_video("data:video/mp4;base64,AAAA", fps=1, num_frames=4),
        f"{FIRST_PART}.video_url.num_frames",
    ),
    "not a video": (with_video(data_url(b"hello, I am text", "video/mp4")), FIRST_PART),
    "a frame is not an image": (with_video([IMAGE, data_url(b"text")]), f"{FIRST_PART}.video_url.url[1]"),
    "too many videos": (
        with_content([{"type": "video_url", "video_url": {"url": [IMAGE] * 2}}] * 2),
        "messages[0].content[1]",
    ),
    # Too long
    "too long": (with_content("word " * 3000), "messages"),
    "too many tokens of images and text": (
        with_content([{"type": "image_url", "image_url": {"url": IMAGE}}, {"type": "text", "text": "x" * 2040}]),
        "messages",
    ),
}


# The same, of documents, with a part of the message.
DOCUMENTS = {
    "not a PDF": (with_file(b"%PDF-1.7 nothing else"), FIRST_PART, "not a complete PDF"),
    "half a document": (with_file(PAGES[:300]), FIRST_PART, "Save it again"),
    "an empty file": (with_file(b""), FIRST_PART, "not a complete PDF"),
    "no pages": (with_file(pdf([CATALOG, b"<< /Type /Pages /Kids [] /Count 0 >>"])), FIRST_PART, "at least one page"),
    "encrypted": (with_file(encrypted("secret")), f"{FILE}.password", "Send its password"),
    "wrong password": (with_file(encrypted("secret"), password="x"), f"{FILE}.password", "does not open the document"),
    "page that does not exist": (with_file(PAGES, pages="2,5"), f"{FILE}.pages", "selects page 5, but"),
    "pages are words": (with_file(PAGES, pages="all"), f"{FILE}.pages", 'such as "1-3,7"'),
    "pages in descending order": (with_file(PAGES, pages="3-1"), f"{FILE}.pages", 'such as "1-3,7"'),
    "too many pages": (with_file(PAGES), FIRST_PART, "At most 3 pages can be rendered for a request, got 4"),
    "a page of 20,000 points": (with_file(document("", size=(20_000, 20))), FIRST_PART, "at most 14400 points"),
    "a page that is a line": (with_file(document("", size=(14_400, 14.4))), FIRST_PART, "more than 200 times"),
    "too much text": (with_file(document("word " * 300)), FIRST_PART, "page 1 of the document has more than 1000"),
    "too much text in all pages": (
        with_file(document(*["\n".join(["word word word"] * 50)] * 5, size=(280, 1000)), render="text"),
        FIRST_PART,
        "the pages up to 4 of the document has more than 3000",
    ),
    "no text layer": (with_file(document(""), render="text"), f"{FILE}.render", "no text layer"),
    "too many dots per inch": (with_file(PAGES, dpi=2400, pages="1"), f"{FILE}.dpi", "set `max_pixels` as well"),
    "dpi is 0": (with_file(PAGES, dpi=0), f"{FILE}.dpi", "at least 1"),
    "unknown rendering": (with_file(PAGES, render="all"), f"{FILE}.render", "'image', 'text' or 'both'"),
    "an option of images": (with_file(PAGES, video_metadata={"fps": 1}), f"{FILE}.video_metadata", "kind document"),
    "a stored file": (
        with_content([{"type": "file", "file": {"file_id": "file-1"}}]), f"{FILE}.file_id", "files are not stored"
    ),
    "a Word document": (
        with_content([{"type": "file", "file": {"file_data": "AAAA", "filename": "a.docx"}}]),
        f"{FILE}.file_data",
        "got 'application/vnd.openxmlformats",
    ),
    "a text file": (
        with_content([{"type": "file", "file": {"file_data": "data:text/csv;base64,AAAA"}}]),
        f"{FILE}.file_data",
        "got 'text/csv'",
    ),
    "a uuid": (
        with_content([{"type": "file", "file": {"file_data": data_url(PAGES, "application/pdf")}, "uuid": "a"}]),
        "messages[0].content[0].uuid",
        "not available for a document",
    ),
    "too many documents": (
        with_content(with_file(PAGES, pages="1")["messages"][0]["content"] * 9), "messages[0].content[8]", "up to 8"
    ),
}  # fmt: skip


MESSAGES = {
    "an image that is too large": (with_image(blank(2000, 2000)), "2000 x 2000 pixels, more than the limit of 1000000"),
    "base64 in lines": (
        with_image(base64.encodebytes(encode(noise(9, 9))).decode()),
        "Put `data:image/png;base64,` in",
    ),
    "URL-safe base64": (
        with_image(base64.urlsafe_b64encode(encode(noise(9, 9), "JPEG")).decode()),
        "Put `data:image/png;base64,` in",
    ),
    "base64 of a video": (
        with_video(base64.b64encode(encode_video(2)).decode()),
        "`data:video/mp4;base64,` for a video",
    ),
    "a path": (with_image("/9j/photo.jpg"), "--allowed-local-media-path"),
    "a private address": (with_image("http://10.0.0.1/a.png"), "--allow-private-addresses"),
    "an empty file": (with_image("data:image/png;base64,"), "The file of the image has 0 bytes."),
}


@pytest.fixture(scope="module")
def client(tiny_checkpoint):
    from dashinfer_vlm_core.testing import scripted_engine
    from tests.server.conftest import serving

    limits = {"max_decoded_pixels": 1_000_000, "document_pages": 3, "document_page_text": 1000}
    limits = {"limit_mm_per_prompt": {"image": 3, "video": 1}, "limits": limits}
    engine = scripted_engine("Fine.", model=str(tiny_checkpoint), served_model_name="tiny", **limits)
    with engine, serving(engine) as server, server.http() as http:
        yield http


def test_table_has_at_least_60_requests():
    assert len(BAD) >= 60


def check_rejected(client, change, param):
    bad = client.post("/v1/chat/completions", **body(change))
    error = bad.json()["error"]
    assert bad.status_code == (404 if change == {"model": "gpt-4o"} else 400), error
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert error["code"]
    assert 10 < len(error["message"]) < 400
    assert not any(secret in error["message"] for secret in ("/tmp", "passwd", "Traceback", "site-packages", "0x"))

    good = client.post("/v1/chat/completions", json=GOOD)
    assert good.json()["choices"][0]["message"]["content"] == "Fine."


@cases(("change", "param"), BAD.values())
def test_bad_request_names_the_field_and_server_continues(client, change, param):
    check_rejected(client, change, param)


@cases(("change", "param", "part"), DOCUMENTS.values())
def test_bad_document_names_field_value_and_next_step(client, change, param, part):
    check_rejected(client, change, param)
    message = client.post("/v1/chat/completions", **body(change)).json()["error"]["message"]
    assert part in message
    assert message.endswith(".")


@pytest.mark.parametrize("name", ["temperature too high", "unknown model", "not an image", "too long"])
def test_bad_streaming_request_names_the_field(client, name):
    change, param = BAD[name]
    bad = client.post("/v1/chat/completions", json=GOOD | change | {"stream": True})
    assert bad.status_code in {400, 404}
    assert bad.json()["error"]["param"] == param


def body(change):
    """Return a valid request with changes, or raw JSON that a dictionary cannot express."""
    return {"content": change} if isinstance(change, str) else {"json": GOOD | change}


@cases(("change", "part"), MESSAGES.values())
def test_message_about_media_has_the_cause_and_the_next_step(client, change, part):
    message = client.post("/v1/chat/completions", **body(change)).json()["error"]["message"]
    assert part in message
    assert len(message) < 400
