"""Every way in which LangChain spells what a message holds."""

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
from tests.samples import data_url, encode, encode_video, noise
from tests.web import body, serve

PICTURES = Path(__file__).parents[2] / "examples" / "pictures"


def text(words):
    return {"type": "text", "text": words}


def base64_of(name):
    return base64.b64encode((PICTURES / name).read_bytes()).decode()


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
def test_a_picture_is_seen_however_it_is_spelled(demo, block):
    assert demo.invoke([HumanMessage([block, text("Describe the picture.")])]).content == "A red circle."


@pytest.mark.parametrize(
    "block",
    [
        {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{MOVING}"}},
        {"type": "video", "base64": MOVING, "mime_type": "video/mp4"},
        {"type": "video", "url": f"data:video/mp4;base64,{MOVING}", "extras": {"fps": 4}},
        {"type": "video", "source_type": "base64", "data": MOVING, "mime_type": "video/mp4"},
    ],
    ids=["OpenAI's kin", "v1 base64", "v1 url", "v0 base64"],
)
def test_a_video_is_seen_however_it_is_spelled(demo, block):
    answer = demo.invoke([HumanMessage([block, text("Which way does the circle move?")])])
    assert answer.content == "It moves to the right."
    assert answer.usage_metadata["input_token_details"]["video"] > 0


def test_a_picture_is_fetched():
    with serve({"/circle.png": body((PICTURES / "circle.png").read_bytes(), "Content-Type: image/png")}) as web:
        chat = ChatDashInferVLM(temperature=0, engine_options={"allow_private_addresses": True})
        content = [{"type": "image", "url": web.url("/circle.png")}, text("Describe the picture.")]
        assert chat.invoke([HumanMessage(content)]).content == "A red circle."


def test_options_of_a_block_bound_its_tokens(scripted):
    """Sizes are counted in visual tokens of 28 x 28 pixels."""
    chat = scripted("Yes.").chat
    picture = {"type": "image", "url": data_url(encode(noise(300, 400)))}
    video = {"type": "video", "url": data_url(encode_video(), "video/mp4")}

    def tokens(block, **extras):
        details = chat.invoke([HumanMessage([block | {"extras": extras}])]).usage_metadata["input_token_details"]
        return details["image"] or details["video"]

    assert tokens(picture, max_pixels=28 * 28 * 20) <= 20 < tokens(picture)
    assert tokens(picture | {"max_pixels": 28 * 28 * 20}) <= 20
    assert tokens(picture, detail="high") == tokens(picture)
    assert tokens(video, num_frames=2) * 2 == tokens(video, num_frames=4)
    named = tokens(picture, uuid="a picture")
    assert tokens({"type": "image"}, uuid="a picture") == named


def test_messages_keep_their_places_and_their_names():
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


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_answers_come_back_in_the_next_turn(demo, version):
    chat = demo.model_copy(update={"output_version": version})
    picture = {"type": "image", "base64": CIRCLE, "mime_type": "image/png"}
    turns = [HumanMessage([picture, text("Describe the picture.")])]
    first = chat.invoke(turns)
    assert isinstance(first.content, list) == (version == "v1")
    second = chat.invoke([*turns, first, HumanMessage("Where is the circle?")])
    assert second.text == "The circle is in the top left."


def test_what_other_models_thought_and_called_is_no_text():
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
        ({"type": "file", "base64": "AAAA", "mime_type": "application/pdf"}, UnsupportedParameter, "type"),
        ({"type": "image", "file_id": "file-1"}, UnsupportedParameter, "file_id"),
        ({"type": "video", "base64": "AAAA"}, InvalidParameter, "mime_type"),
        ({"type": "image", "url": "data:,", "extras": {"fps": 1}}, UnsupportedParameter, "extras.fps"),
        ({"type": "video", "url": "data:,", "extras": {"frames": 1}}, UnsupportedParameter, "extras.frames"),
        ({"type": "video"}, InvalidParameter, None),
        ({"type": "image", "url": "data:image/png;base64,AAAA"}, MediaUndecodable, None),
        ({"no": "type"}, UnsupportedParameter, "type"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_its_place(scripted, block, error, param):
    provider = scripted("Yes.")
    with pytest.raises(error) as caught:
        provider.chat.invoke([SystemMessage("Hm."), HumanMessage([text("?"), block])])
    assert caught.value.param == "messages[1].content[1]" + (f".{param}" if param else "")
    assert not provider.script.requests


@pytest.mark.parametrize("message", [FunctionMessage("1", name="f"), RemoveMessage("1")])
def test_messages_of_other_kinds_are_refused(message):
    with pytest.raises(UnsupportedParameter, match=type(message).__name__):
        to_openai([message])


def test_a_model_holds_no_pictures():
    with pytest.raises(UnsupportedParameter) as caught:
        to_openai([AIMessage([{"type": "image", "url": "https://a/b.png"}])])
    assert caught.value.param == "messages[0].content[0].type"
