"""Models in Ollama's API: lists, descriptions, and how requests load and unload them."""

from __future__ import annotations

import contextlib
from datetime import datetime, timedelta, timezone

import pytest

from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.engine.managed_models import ManagedModel
from dashinfer_vlm_core.engine.manager import ModelManager
from dashinfer_vlm_core.engine.model_rules import ModelPolicy
from dashinfer_vlm_core.testing import Script, scripted_registry
from dashinfer_vlm_server.api_keys import ApiKeys
from tests.server.conftest import serving
from tests.server.test_ollama import CHAT, GENERATE, lines
from tests.waiting import until


def test_model_is_listed_and_described(scripted, tiny_checkpoint):
    with scripted("Yes.").server.http() as client:
        (listed,) = client.get("/api/tags").json()["models"]
        (loaded,) = client.get("/api/ps").json()["models"]
        assert listed["name"] == listed["model"] == loaded["name"] == "tiny:latest"
        assert (listed["digest"], loaded["context_length"]) == (loaded["digest"], 2048)
        shown = client.post("/api/show", json={"model": "tiny:latest", "verbose": True}).json()
        assert shown == client.post("/api/show", json={"name": "tiny"}).json()
        assert shown["details"] == listed["details"] == loaded["details"]
        assert loaded["expires_at"] == "9999-12-31T00:00:00.000000Z"
        assert shown["details"]["family"] == "qwen2_vl"
        assert shown["details"]["quantization_level"] == "F32"
        assert listed["size"] == loaded["size"] == sum(path.stat().st_size for path in tiny_checkpoint.glob("*.saf*"))
        count = shown["model_info"].pop("general.parameter_count")
        assert shown["details"]["parameter_size"] == f"{count / 1e6:.2f}M"
        assert 3.9 < listed["size"] / count < 4.5  # the count has no biases and norms
        assert shown["model_info"] == {"general.architecture": "qwen2_vl", "qwen2_vl.context_length": 2048}
        assert shown["capabilities"] == ["completion", "tools", "vision"]
        assert client.post("/api/show", json={"model": "no"}).status_code == 404
        assert client.get("/api/version").json()["version"]
        assert client.head("/api/version").status_code == client.head("/").status_code == 200
        assert lines(client.post("/api/pull", json={"model": "tiny"})) == [{"status": "success"}]
        assert client.post("/api/pull", json={"model": "tiny", "stream": False}).json() == {"status": "success"}
        assert client.post("/api/pull", json={"model": "no"}).status_code == 404
        assert client.request("DELETE", "/api/delete", json={"model": "tiny"}).status_code == 400


def test_root_names_ollama_if_there_is_no_page(scripted):
    with scripted("Yes.", settings={"page": False}).server.http() as client:
        assert client.get("/").text == "Ollama is running"
    with scripted("Yes.").server.http() as client:
        assert "html" in client.get("/").headers["content-type"]


@pytest.fixture
def managed(tiny_checkpoint):
    """Serve the models `a`, with the alias `b:latest`, and `c`, of which the memory holds one; or `a` alone, pinned."""
    with contextlib.ExitStack() as stack:

        def start(*, pinned=False, **settings):
            names = {"a": ("b:latest",)} if pinned else {"a": ("b:latest",), "c": ()}
            options = {"model": str(tiny_checkpoint), "decoder": "scripted"}
            models = [
                ManagedModel(config=EngineConfig(served_model_name=name, **options), aliases=aliases, pinned=pinned)
                for name, aliases in names.items()
            ]
            registry = scripted_registry(Script("Yes."))
            policy = ModelPolicy(memory_limit=10, idle_unload=600)
            manager = ModelManager(models, policy=policy, estimate=lambda _: 10, registry=registry)
            stack.callback(manager.close)
            return stack.enter_context(stack.enter_context(serving(manager.start(), **settings)).http())

        yield start


def loaded(client):
    return [model["name"] for model in client.get("/api/ps").json()["models"]]


def test_models_are_loaded_by_requests_and_unloaded_by_keep_alive(managed):
    client = managed(allow_model_management=True)
    assert [model["name"] for model in client.get("/api/tags").json()["models"]] == ["a:latest", "b:latest", "c:latest"]
    shown = client.post("/api/show", json={"model": "c"}).json()
    assert (shown["capabilities"], loaded(client)) == (["completion", "tools", "vision"], [])
    for path, body, text in (
        (GENERATE, {"model": "a"}, {"response": ""}),
        (CHAT, {"model": "c", "messages": []}, {"message": {"role": "assistant", "content": ""}}),
    ):
        response = client.post(path, json=body).json()
        assert (response["done"], response["done_reason"]) == (True, "load")
        assert text.items() <= response.items()
        assert loaded(client) == [f"{body['model']}:latest"]
        assert client.post(path, json={**body, "keep_alive": 0}).json()["done_reason"] == "unload"
        until(lambda: not loaded(client))
    body = {"model": "b", "prompt": "Hello"}
    last = lines(client.post(GENERATE, json=body))[-1]
    assert (last["model"], last["load_duration"] > 0, loaded(client)) == ("b", True, ["a:latest"])
    (model,) = client.get("/api/ps").json()["models"]
    expires = datetime.strptime(model["expires_at"], "%Y-%m-%dT%H:%M:%S.%f%z")
    assert timedelta() < expires - datetime.now(timezone.utc) < timedelta(minutes=10)
    last = lines(client.post(GENERATE, json={**body, "keep_alive": "0s"}))[-1]
    assert last["done_reason"] == "stop"
    until(lambda: not loaded(client))
    assert client.post(GENERATE, json={"model": "no"}).status_code == 404


def test_only_administrators_unload_models(managed, tmp_path):
    (tmp_path / "keys").write_text("sk-root admin=true\nsk-user\n")
    client = managed(keys=ApiKeys(file=tmp_path / "keys"))
    found = []
    for key in ("sk-user", "sk-root"):
        client.headers["authorization"] = f"Bearer {key}"
        for body in ({"model": "a"}, {"model": "a", "prompt": "Hello"}):
            found += [client.post(GENERATE, json={**body, "keep_alive": value}).status_code for value in (60, 0)]
    assert found == [200, 403, 200, 403, 200, 200, 200, 200]


def test_model_is_unloaded_also_if_the_request_fails(managed):
    client = managed(allow_model_management=True)
    for path, body in ((GENERATE, {"prompt": "a " * 9000}), ("/api/embed", {"input": "a"})):
        response = client.post(path, json={"model": "a", "keep_alive": 0, **body})
        assert response.status_code == 400
        assert loaded(client) == []


@pytest.mark.parametrize("stream", [False, True])
def test_pinned_model_is_an_error_before_the_first_line(managed, stream):
    client = managed(pinned=True, allow_model_management=True)
    for body in ({}, {"prompt": "Hello"}):
        response = client.post(GENERATE, json={"model": "a", "keep_alive": 0, "stream": stream, **body})
        assert (response.status_code, "is pinned" in response.json()["error"]) == (400, True)
    assert loaded(client) == ["a:latest"]
