"""Streams show how far images and videos are encoded, until the first token; disconnecting ends the request."""

from __future__ import annotations

import pytest

from dashinfer_vlm_server import sse
from tests.samples import image_url
from tests.waiting import until

FRAMES = [image_url(28, 28, seed) for seed in range(8)]
VIDEO = {"type": "video_url", "video_url": {"url": FRAMES}}
IMAGE = {"type": "image_url", "image_url": {"url": FRAMES[0]}}
CHAT = "/v1/chat/completions"


def asking(*content):
    return {"messages": [{"role": "user", "content": [*content, {"type": "text", "text": "Hi"}]}], "stream": True}


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        (CHAT, asking(VIDEO, IMAGE), ": vision 5/5"),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_video", "video_url": {"url": FRAMES}}]}]},
            ": vision 4/4",
        ),
        (CHAT, asking(), ""),
    ],
)
def test_comments_count_images_and_pairs_of_frames(scripted, monkeypatch, path, body, last):
    monkeypatch.setattr(sse, "COMMENT_SECONDS", 0.01)
    served = scripted("Fine.", delay=0.3)
    with served.server.http() as client:
        lines = client.post(path, json={**body, "stream": True}).text.splitlines()
    comments = [line for line in lines if line.startswith(":")]
    assert lines[: 2 * len(comments) : 2] == comments  # before all events
    assert all(line.startswith(": vision ") for line in comments)
    assert comments[-1:] == ([last] if last else [])
    assert "data: [DONE]" in lines[-2:]


def test_quick_stream_has_no_comments(scripted):
    with scripted("Fine.").server.http() as client:
        text = client.post(CHAT, json=asking(VIDEO)).text
    assert text.startswith("data: {")
    assert "vision" not in text


def test_disconnect_after_a_comment_frees_the_request(scripted, monkeypatch):
    monkeypatch.setattr(sse, "COMMENT_SECONDS", 0.01)
    served = scripted("Fine.", delay=60)
    with served.server.http() as client, client.stream("POST", CHAT, json=asking(VIDEO)) as response:
        lines = response.iter_lines()  # kept: the connection is closed with the iterator
        assert next(lines).startswith(": vision ")
        until(lambda: served.script.running == 1)
    until(lambda: served.script.running == 0)
