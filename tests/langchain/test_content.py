"""Conversion of LangChain content blocks and messages."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from dashinfer_vlm_core.errors import InvalidParameter, MediaUndecodable, UnsupportedParameter
from dashinfer_vlm_core.protocol import ChatRequest
from dashinfer_vlm_langchain import ChatDashInferVLM
from dashinfer_vlm_langchain.messages import to_openai
from tests.pdfs import document
from tests.samples import data_url, encode, encode_video, noise
from tests.web import body, serve

IMAGES = Path(__file__).parents[2] / "examples" / "pictures"


def text(words):
    return {"type": "text", "text": words}


def base64_of(name):
    return base64.b64encode((IMAGES / name).read_bytes()).decode()


CIRCLE, MOVING = base64_of("circle.png"), base64_of("moving.mp4")


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{CIRCLE}"}},
        {"type": "image", "base64": CIRCLE, "mime_type": "image/png"},
        {"type": "image", "url": f"data:image/png;base64,{CIRCLE}", "id": "lc_1", "index": 0},
        {"type": "image", "source_type": "base64", "data": CIRCLE, "mime_type": "image/png"},
        {"type": "image", "source_type": "url", "url": f"data:image/png;base64,{CIRCLE}"},
    ],
    ids=["OpenAI's", "v1 base64", "v1 url", "v0 base64", "v0 url"],
)
def test_image_block_formats(demo, block):
    assert demo.invoke([HumanMessage([block, text("Describe the picture.")])]).content == "A red circle."


@pytest.mark.parametrize(
    "block",
    [
        {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{MOVING}"}},
        {"type": "input_video", "input_video": {"data": MOVING}},
        {"type": "video", "base64": MOVING, "mime_type": "video/mp4"},
        {"type": "video", "url": f"data:video/mp4;base64,{MOVING}", "extras": {"fps": 4}},
        {"type": "video", "source_type": "base64", "data": MOVING, "mime_type": "video/mp4"},
    ],
    ids=["OpenAI's kin", "llama.cpp's", "v1 base64", "v1 url", "v0 base64"],
)
def test_video_block_formats(demo, block):
    response = demo.invoke([HumanMessage([block, text("Which way does the circle move?")])])
    assert response.content == "It moves to the right."
    assert response.usage_metadata["input_token_details"]["video"] > 0


def test_image_url_is_fetched():
    with serve({"/circle.png": body((IMAGES / "circle.png").read_bytes(), "Content-Type: image/png")}) as web:
        chat = ChatDashInferVLM(temperature=0, engine_options={"allow_private_addresses": True})
        content = [{"type": "image", "url": web.url("/circle.png")}, text("Describe the picture.")]
        assert chat.invoke([HumanMessage(content)]).content == "A red circle."


def test_block_options_limit_visual_tokens(scripted):
    """A visual token covers 28 x 28 pixels."""
    chat = scripted("Yes.").chat
    image = {"type": "image", "url": data_url(encode(noise(300, 400)))}
    video = {"type": "video", "url": data_url(encode_video(), "video/mp4")}

    def tokens(block, **extras):
        details = chat.invoke([HumanMessage([block | {"extras": extras}])]).usage_metadata["input_token_details"]
        return details["image"] or details["video"]

    assert tokens(image, max_pixels=28 * 28 * 20) <= 20 < tokens(image)
    assert tokens(image | {"max_pixels": 28 * 28 * 20}) <= 20
    assert tokens(image, detail="high") == tokens(image)
    assert tokens(video, num_frames=2) * 2 == tokens(video, num_frames=4)
    named = tokens(image, uuid="a image")
    assert tokens({"type": "image"}, uuid="a image") == named


def test_coordinates_of_the_original_image(scripted):
    chat = scripted("(500,500)").chat
    messages = [HumanMessage([{"type": "image", "url": data_url(encode(noise(200, 300)))}, text("Where?")])]
    assert chat.invoke(messages, coordinates="original").content == "(150,100)"


def test_to_openai_keeps_order_and_names():
    sent = to_openai(
        [
            SystemMessage("Be brief."),
            HumanMessage(["One.", text("Two."), {"type": "text-plain", "text": "Three."}], name="ann"),
            AIMessage("", tool_calls=[{"name": "f", "args": {"x": "é"}, "id": "1"}]),
            ToolMessage([{"type": "image", "url": "https://a/b.png"}], tool_call_id="1"),
            ChatMessage("Four.", role="developer"),
        ]
    )
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "tool", "developer"]
    assert [part["text"] for part in sent[1]["content"]] == ["One.", "Two.", "Three."]
    assert sent[1]["name"] == "ann"
    assert sent[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": "é"}'}
    assert sent[3] == {
        "role": "tool",
        "content": [{"type": "image_url", "image_url": {"url": "https://a/b.png"}}],
        "tool_call_id": "1",
    }
    ChatRequest.parse({"messages": sent})


PDF = base64.b64encode(document("Page one", "Page two", size=(84, 84))).decode()


@pytest.mark.parametrize(
    "block",
    [
        {
            "type": "file",
            "file": {"file_data": f"data:application/pdf;base64,{PDF}", "filename": "a.pdf", "pages": "2"},
        },
        {"type": "file", "base64": PDF, "mime_type": "application/pdf", "extras": {"filename": "a.pdf", "pages": "2"}},
        {"type": "file", "url": f"data:application/pdf;base64,{PDF}", "pages": "2"},
        {"type": "file", "source_type": "base64", "data": PDF, "mime_type": "application/pdf", "pages": "2"},
    ],
    ids=["OpenAI's", "v1 base64", "v1 url", "v0 base64"],
)
def test_file_block_formats(scripted, read_prompt, block):
    provider = scripted("Yes.")
    call = {"name": "f", "args": {}, "id": "1"}
    for messages in (
        [HumanMessage([block, text("What?")])],
        [HumanMessage("?"), AIMessage("", tool_calls=[call]), ToolMessage([block], tool_call_id="1")],
    ):
        assert provider.chat.invoke(messages).content == "Yes."
        request = provider.script.requests[-1]
        assert "Page two" in read_prompt(request)
        assert "Page one" not in read_prompt(request)
        assert len(request.spans) == 1


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_response_is_accepted_in_next_request(demo, version):
    chat = demo.model_copy(update={"output_version": version})
    image = {"type": "image", "base64": CIRCLE, "mime_type": "image/png"}
    messages = [HumanMessage([image, text("Describe the picture.")])]
    first = chat.invoke(messages)
    assert isinstance(first.content, list) == (version == "v1")
    second = chat.invoke([*messages, first, HumanMessage("Where is the circle?")])
    assert second.text == "The circle is in the top left."


def test_reasoning_and_calls_are_not_sent_as_text():
    blocks = [
        {"type": "reasoning", "reasoning": "Hm."},
        text("Yes."),
        {"type": "tool_use", "id": "1", "name": "f", "input": {}},
    ]
    broken = [{"type": "invalid_tool_call", "name": "f", "args": "{", "id": "2", "error": "no JSON"}]
    (sent,) = to_openai(
        [AIMessage(blocks, tool_calls=[{"name": "f", "args": {}, "id": "1"}], invalid_tool_calls=broken)]
    )
    assert sent["content"] == "Yes."
    assert [call["function"]["arguments"] for call in sent["tool_calls"]] == ["{}", "{"]


@pytest.mark.parametrize(
    ("block", "error", "param"),
    [
        ({"type": "audio", "base64": "AAAA", "mime_type": "audio/wav"}, UnsupportedParameter, "type"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, UnsupportedParameter, "type"),
        ({"type": "file", "base64": "AAAA", "mime_type": "text/csv"}, UnsupportedParameter, "file.file_data"),
        ({"type": "file", "base64": "AAAA"}, InvalidParameter, "mime_type"),
        ({"type": "file", "file_id": "file-1"}, UnsupportedParameter, "file_id"),
        ({"type": "file", "url": "data:,", "extras": {"page": 1}}, UnsupportedParameter, "extras.page"),
        ({"type": "image", "file_id": "file-1"}, UnsupportedParameter, "file_id"),
        ({"type": "video", "base64": "AAAA"}, InvalidParameter, "mime_type"),
        ({"type": "image", "url": "data:,", "extras": {"fps": 1}}, UnsupportedParameter, "extras.fps"),
        ({"type": "video", "url": "data:,", "extras": {"frames": 1}}, UnsupportedParameter, "extras.frames"),
        ({"type": "video"}, InvalidParameter, None),
        ({"type": "image", "url": "data:image/png;base64,AAAA"}, MediaUndecodable, None),
        ({"no": "type"}, UnsupportedParameter, "type"),
    ],
)
def test_unsupported_block_error_names_its_path(scripted, block, error, param):
    provider = scripted("Yes.")
    with pytest.raises(error) as caught:
        provider.chat.invoke([SystemMessage("Hm."), HumanMessage([text("?"), block])])
    assert caught.value.param == "messages[1].content[1]" + (f".{param}" if param else "")
    assert not provider.script.requests


@pytest.mark.parametrize("message", [FunctionMessage("1", name="f"), RemoveMessage("1")])
def test_unsupported_message_type_is_rejected(message):
    with pytest.raises(UnsupportedParameter, match=type(message).__name__):
        to_openai([message])


def test_images_in_assistant_messages_are_rejected():
    with pytest.raises(UnsupportedParameter) as caught:
        to_openai([AIMessage([{"type": "image", "url": "https://a/b.png"}])])
    assert caught.value.param == "messages[0].content[0].type"
