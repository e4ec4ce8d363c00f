"""Tests of the page's files and its endpoint, without a browser."""

from __future__ import annotations

import base64
import io
import re
import zipfile

import pytest
from PIL import Image

from dashinfer_vlm_core.testing import scripted_engine
from dashinfer_vlm_server.endpoints.page import FILES, STATIC
from tests.conversations import as_openai, blurred_image, user
from tests.server.conftest import serving

TEXTS = [path for path in STATIC.iterdir() if path.suffix in {".css", ".html", ".js", ".svg"}]


@pytest.fixture(scope="module")
def engine():
    with scripted_engine("Yes.", max_batch_size=1, max_waiting=0) as engine:
        yield engine


@pytest.fixture(scope="module")
def http(engine):
    with serving(engine) as server, server.http() as client:
        yield client


def test_page_files_have_a_strict_content_security_policy(http):
    assert {"/", "/page/page.js", "/page/page.css"} <= set(FILES)
    for path in FILES:
        response = http.get(path)
        assert response.status_code == 200
        policy = response.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Referrer-Policy"] == "no-referrer"


@pytest.mark.parametrize(
    "path", ["/page/", "/page/index.html", "/page/../page.py", "/page/%2e%2e/page.py", "/page/none.js"]
)
def test_other_files_are_not_served(http, path):
    assert http.get(path).json()["error"]["code"] == "unknown_url"


def test_page_can_be_disabled(engine):
    with serving(engine, page=False) as server, server.http() as client:
        assert client.get("/").text == "Ollama is running"
        assert client.get("/page/page.js").status_code == 404
        assert client.post("/v1/media/preview", json={}).status_code == 404
        assert client.get("/v1/models").status_code == 200


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_page_has_no_remote_or_inline_code(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"""(?:src|href|url|import|from)\W{1,3}(?:https?:)?//""", text)
    assert not re.search(
        r"<style|\sstyle=|<script>|\son\w+=\"|javascript:|innerHTML|outerHTML|insertAdjacent|eval\(", text
    )


def test_models_have_what_the_page_shows_of_them(http):
    (model,) = http.get("/v1/models").json()["data"]
    assert model["description"].startswith("A tiny model to try the API with. It knows five shapes (circle, ")
    assert model["example_prompts"][0] == "Describe the picture."
    assert model["generation_config"] == {"temperature": 0}


def test_preview_returns_frames_and_token_counts(http):
    body = {"messages": as_openai([user(blurred_image(1, 200, 100), [blurred_image(2)] * 3, "Compare.")])}
    response = http.post("/v1/media/preview", json=body).json()
    image, video = response["data"]
    assert response["object"] == "media.preview"
    assert (image["part"], image["kind"], image["source_size"]) == ("messages[0].content[0]", "image", [200, 100])
    assert image["tokens"] == image["cells"][1] * image["cells"][2]
    assert [frame["index"] for frame in video["frames"]] == [0, 1, 2, 3]
    shown = Image.open(io.BytesIO(base64.b64decode(image["frames"][0]["url"].partition(",")[2])))
    assert list(shown.size) == image["size"]
    assert response["prompt_tokens"] > image["tokens"] + video["tokens"]


def test_preview_errors_match_chat_errors(http):
    content = [{"type": "image_url", "image_url": {"url": "data:,x"}}]
    rejected = http.post("/v1/media/preview", json={"messages": [{"role": "user", "content": content}]})
    assert rejected.status_code == 400
    assert rejected.json()["error"]["param"] == "messages[0].content[0]"
    assert http.post("/v1/media/preview", content=b"{").json()["error"]["code"] == "invalid_json"
    assert http.get("/v1/media/preview").status_code == 405


@pytest.mark.slow
def test_wheel_contains_the_page(tmp_path):
    from hatchling.builders.wheel import WheelBuilder

    (wheel,) = WheelBuilder(str(STATIC.parents[4])).build(directory=str(tmp_path), versions=["standard"])
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"dashinfer_vlm_server/endpoints/page/static/{file.name}" for file in STATIC.iterdir()} <= set(names)
