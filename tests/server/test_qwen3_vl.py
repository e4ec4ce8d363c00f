"""Requests with images and videos to a server with Qwen3-VL, end to end."""

from __future__ import annotations

import json

import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from tests.conversations import as_openai, blurred_image, user
from tests.qwen3_vl.tiny_qwen3 import write_checkpoint
from tests.server.conftest import serving

SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "count": {"type": "integer"}},
    "required": ["color", "count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("qwen3"))
    config = EngineConfig(model=str(folder), served_model_name="tiny", device="cpu", dtype="float32", kv_cache_mib=64)
    with Engine(config) as engine, serving(engine) as server:
        yield server


MESSAGES = as_openai([user(blurred_image(1), "Compare with ", [blurred_image(seed) for seed in (2, 3, 4)], "Count.")])


def test_json_request_with_image_and_video(server):
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}
    request = {"messages": MESSAGES, "max_tokens": 200, "temperature": 0, "response_format": schema}
    with server.http() as client:
        response = client.post("/v1/chat/completions", json=request)
    assert response.status_code == 200, response.text
    completion = response.json()
    answer = json.loads(completion["choices"][0]["message"]["content"])
    assert answer["color"] in ("red", "blue")
    assert type(answer["count"]) is int
    usage = completion["usage"]["prompt_tokens_details"]
    assert (usage["image_tokens"], usage["video_tokens"]) == (16, 2 * 16)


@pytest.mark.slow
def test_streamed_equals_whole(server):
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    with server.openai() as client:
        whole = client.chat.completions.create(**options)
        chunks = list(client.chat.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content


def test_preview_shows_frames_as_the_model_sees_them(server):
    with server.http() as client:
        preview = client.post("/v1/media/preview", json={"messages": MESSAGES}).json()
    assert [(item["kind"], item["tokens"]) for item in preview["data"]] == [("image", 16), ("video", 32)]
