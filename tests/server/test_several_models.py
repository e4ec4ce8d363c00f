"""Several models in one server: routing, state, loading, failures, operators' requests, and options."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import click
import openai
import pytest
from click.testing import CliRunner

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.engine.managed_models import ManagedModel
from dashinfer_vlm_core.engine.manager import ModelManager
from dashinfer_vlm_core.engine.model_rules import ModelPolicy
from dashinfer_vlm_core.errors import ConfigError
from dashinfer_vlm_core.testing import Script, scripted_registry
from dashinfer_vlm_server import plugin, sse
from dashinfer_vlm_server.api_keys import ApiKeys
from dashinfer_vlm_server.engines import create_engine
from dashinfer_vlm_server.help import from_options
from dashinfer_vlm_server.model_options import ModelOptions
from tests.server.conftest import serving
from tests.tiny import write_checkpoint
from tests.waiting import until

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
CHAT = "/v1/chat/completions"
ONE = 10**12
"""A limit that holds one model."""


@pytest.fixture
def served(tiny_checkpoint):
    """Serve the models `a` and `b` with scripted responses, of which the memory holds one."""
    with contextlib.ExitStack() as stack:

        def start(script=None, *, folders=None, settings=None, registry=None, **options):
            folders = folders or {"a": tiny_checkpoint, "b": tiny_checkpoint}
            decoder = {} if registry is False else {"decoder": "scripted"}
            models = [
                ManagedModel(
                    config=EngineConfig(model=str(folder), served_model_name=name, **decoder, **options),
                    aliases=("best",) if name == "b" else (),
                )
                for name, folder in folders.items()
            ]
            manager = ModelManager(
                models,
                policy=ModelPolicy(memory_limit=ONE),
                estimate=lambda _: ONE,
                registry=None if registry is False else scripted_registry(script or Script("Yes.")),
            )
            stack.callback(manager.close)
            return stack.enter_context(serving(manager.start(), **(settings or {})))

        yield start


def test_requests_of_many_users_get_the_response_of_their_model(served, tmp_path):
    """The memory holds one of the two models; every response is that of the model alone."""
    folders = {name: write_checkpoint(tmp_path / name, seed=seed) for seed, name in enumerate("ab")}
    bodies = [{**HELLO, "model": name, "max_tokens": 5, "temperature": 0} for name in "ab"]
    options = {"max_model_len": 256, "kv_cache_mib": 16}
    expected = {}
    for body in bodies:
        with Engine(EngineConfig(model=str(folders[body["model"]]), **options)) as engine:
            expected[body["model"]] = engine.chat(body).choices[0].message.content
    assert expected["a"] != expected["b"]
    server = served(folders=folders, registry=False, **options)

    def user(number):
        with server.http() as client:
            for body in itertools.islice(itertools.cycle(bodies), number % 2, number % 2 + 5):
                response = client.post(CHAT, json=body)
                assert response.status_code == 200, response.text
                assert response.json()["model"] == body["model"]
                assert response.json()["choices"][0]["message"]["content"] == expected[body["model"]]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(user, range(4))) == [None] * 4


def test_models_are_listed_with_their_state(served):
    with served().http() as client:
        client.post(CHAT, json={**HELLO, "model": "best"})
        listed = client.get("/v1/models").json()["data"]
        assert [(each["id"], each["root"], each["state"]) for each in listed] == [
            ("a", "a", "unloaded"),
            ("b", "b", "ready"),
            ("best", "b", "ready"),
        ]
        assert client.get("/v1/models/best").json() == listed[2]
        health = client.get("/health/ready")
        assert (health.status_code, health.json()["models"]) == (200, {"a": "unloaded", "b": "ready"})


def test_server_without_a_loaded_model_is_ready(served):
    with served().http() as client:
        health = client.get("/health/ready")
    expected = {"status": "ready", "model": "a", "models": {"a": "unloaded", "b": "unloaded"}}
    assert (health.status_code, health.json()) == (200, expected)


def test_unknown_model_is_404_with_the_names(served):
    names = "'no' is not served here. Use 'a' or 'b' or 'best'."
    with served().http() as client:
        for path, body in {CHAT: HELLO, "/tokenize": {"prompt": "x"}, "/v1/responses": {"input": "x"}}.items():
            for stream in (False, True):
                response = client.post(path, json={**body, "model": "no", "stream": stream})
                assert response.status_code == 404
                assert names in response.json()["error"]["message"]
        assert names in client.get("/v1/models/no").json()["error"]["message"]
        assert names in client.post("/api/show", json={"model": "no"}).json()["error"]


def test_text_is_tokenized_by_the_named_model(served, tiny_checkpoint):
    with served().http() as client:
        tokens = client.post("/tokenize", json={"model": "best", "prompt": "Hello", "return_token_strs": True}).json()
        assert client.post("/detokenize", json={"model": "b", "tokens": tokens["tokens"]}).json()["prompt"] == "Hello"
        assert len(tokens["token_strs"]) == tokens["count"]
        assert tokens["max_model_len"] == 2048
        assert client.get("/health").json()["models"] == {"a": "unloaded", "b": "ready"}


def test_stream_shows_that_its_model_is_loaded(served, monkeypatch):
    """The model `a` is in use, so `b` is loaded when its stream has ended; comments keep the connection open."""
    monkeypatch.setattr(sse, "COMMENT_SECONDS", 0.01)
    server = served(Script("word " * 20, "Yes.", delay=0.005))
    with server.http() as client, client.stream("POST", CHAT, json={**HELLO, "model": "a", "stream": True}) as first:
        lines = first.iter_lines()
        next(lines)
        with server.http() as other, other.stream("POST", CHAT, json={**HELLO, "model": "b", "stream": True}) as second:
            waiting = second.iter_lines()
            assert next(waiting) == ": loading b"
            assert list(lines)[-2] == "data: [DONE]"
            received = [line for line in waiting if line and line != ": loading b"]
    assert received[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in received)


@pytest.mark.parametrize("comment_seconds", [0.0, 1000.0])
def test_failed_load_is_503_with_the_reason(served, tiny_checkpoint, tmp_path, monkeypatch, comment_seconds):
    """After comments, the error is in the stream."""
    monkeypatch.setattr(sse, "COMMENT_SECONDS", comment_seconds)
    shutil.copytree(tiny_checkpoint, tmp_path, dirs_exist_ok=True)
    with served(folders={"a": tiny_checkpoint, "b": tmp_path}).http() as client:
        (tmp_path / "config.json").write_text("{")
        streamed = client.post(CHAT, json={**HELLO, "model": "b", "stream": True})
        response = client.post(CHAT, json={**HELLO, "model": "b"})
        assert client.post(CHAT, json={**HELLO, "model": "a"}).status_code == 200
        assert {each["id"]: each["state"] for each in client.get("/v1/models").json()["data"]}["b"] == "failed"
    assert response.status_code == 503
    assert int(response.headers["Retry-After"]) > 0
    error = response.json()["error"]
    assert error["code"] == "model_load_failed"
    assert "'b' could not be loaded" in error["message"]
    assert str(tmp_path.parent) not in response.text
    if streamed.status_code == 200:
        streamed_error = streamed.text.rpartition("data: ")[2]
    else:
        assert streamed.status_code == 503
        streamed_error = streamed.text
    assert json.loads(streamed_error)["error"] == error


@pytest.mark.parametrize(
    ("key", "allow", "status"),
    [
        ("sk-root", False, 200),
        ("sk-user", False, 403),
        ("sk-user", True, 403),
        ("", True, 200),
        ("", False, 403),
    ],
)
def test_operators_load_and_unload_models(served, tmp_path, key, allow, status):
    settings = {"allow_model_management": allow}
    if key:
        (tmp_path / "keys").write_text("sk-root admin=true\nsk-user\n")
        settings["keys"] = ApiKeys(file=tmp_path / "keys")
    with served(settings=settings).http() as client:
        client.headers.update({"Authorization": f"Bearer {key}"} if key else {})
        loaded = client.post("/v1/models/load", json={"model": "best"})
        assert loaded.status_code == status
        if status == 403:
            assert loaded.json()["error"]["code"] == "access_denied"
            assert client.post("/v1/models/unload", json={"model": "b"}).status_code == 403
            return
        assert (loaded.json()["id"], loaded.json()["state"]) == ("b", "ready")
        assert client.post("/v1/models/unload", json={"model": "b"}).status_code == 200
        until(lambda: client.get("/v1/models/b").json()["state"] == "unloaded")
        assert client.post("/v1/models/load", json={"model": "no"}).status_code == 404
        assert client.post("/v1/models/load", json={}).status_code == 400


def test_models_are_loaded_by_names_that_are_not_listed(served, tiny_checkpoint):
    with served(settings={"allow_model_management": True}).http() as client:
        for name in ("model", str(tiny_checkpoint)):
            for action in ("load", "unload"):
                response = client.post(f"/v1/models/{action}", json={"model": name})
                assert (response.status_code, response.json()["id"]) == (200, "a")


def test_model_of_one_engine_is_not_managed(scripted):
    with scripted("Yes.", settings={"allow_model_management": True}).server.http() as client:
        response = client.post("/v1/models/unload", json={"model": "tiny"})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "not_supported")
        assert "state" not in client.get("/v1/models").json()["data"][0]
        assert "models" not in client.get("/health").json()


def test_metrics_have_a_label_for_their_model(served):
    with served().http() as client:
        for name in ("a", "b", "b"):
            client.post(CHAT, json={**HELLO, "model": name})
        text = client.get("/metrics").text
    for line in (
        'time_to_first_token_seconds_count{model_name="a"} 1.0',
        'time_to_first_token_seconds_count{model_name="b"} 2.0',
        'ready{model_name="a"} 0.0',
        'ready{model_name="b"} 1.0',
        'active_requests{model_name="b"} 0.0',
        'requests_total{outcome="success",route="/v1/chat/completions"} 3.0',
    ):
        assert f"dashinfer_vlm_{line}" in text


def test_stored_responses_are_continued_by_their_model_only(served):
    with served().openai() as client:
        first = client.responses.create(model="b", input="Hello")
        assert client.responses.create(model="best", input="And?", previous_response_id=first.id).id
        with pytest.raises(openai.BadRequestError, match="is of another model"):
            client.responses.create(model="a", input="And?", previous_response_id=first.id)
        reference = [{"type": "item_reference", "id": first.output[0].id}]
        with pytest.raises(openai.NotFoundError, match="Item with id"):
            client.responses.create(model="a", input=reference)


# Options


@pytest.fixture
def configured(tmp_path, monkeypatch):
    """Return what `dashinfer-vlm serve` creates an engine from."""
    found = []
    monkeypatch.setattr(plugin, "_serve", lambda config, models, options: found.append((config, models, options)) or 0)

    def configured(*words, file=""):
        (tmp_path / "options.yaml").write_text(file)
        group = click.Group(commands={"serve": plugin.serve})
        arguments = ["serve", *words, *(["--config", str(tmp_path / "options.yaml")] if file else [])]
        result = CliRunner().invoke(group, arguments)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        if not found:
            raise click.UsageError(result.output)
        config, models, options = found.pop()
        return config, models, from_options(ModelOptions, options)

    return configured


def test_one_model_needs_no_manager(configured):
    for words in ((), ("demo",), ("--model", "demo"), ("--model", "x=demo")):
        config, models, options = configured(*words)
        assert isinstance(create_engine(config, models, options), Engine)
        assert config.name == ("x" if words[-1:] == ("x=demo",) else "demo")


def test_models_are_listed_on_the_command_line(configured):
    config, models, options = configured("--model", "demo", "--model", "b=demo", "--max-batch-size", "3")
    with contextlib.closing(create_engine(config, models, options)) as manager:
        assert [engine.status().model for engine in manager.models()] == ["demo", "b"]


def test_models_of_a_file_have_options(configured):
    file = """
memory-limit: 90g
idle_unload: 10m
model-wait: 1h
kv-cache-mib: 7
models:
  chat: {model: demo, aliases: [gpt, best], pinned: true, kv-cache-mib: 8, limit_mm_per_prompt: {image: 3}}
  other: demo
"""
    config, models, options = configured(file=file)
    assert (options.memory_limit, options.idle_unload, options.model_wait) == (90 * 2**30, 600, 3600)
    with contextlib.closing(create_engine(config, models, options)) as manager:
        chat, other = (engine._model for engine in manager.models())
    assert (chat.names, chat.pinned, chat.config.kv_cache_mib) == (("chat", "gpt", "best"), True, 8)
    assert chat.config.limit_mm_per_prompt.image == 3
    assert (other.names, other.pinned, other.config.kv_cache_mib) == (("other",), False, 7)


@pytest.mark.parametrize(
    ("words", "file", "message"),
    [
        (["--model", "demo", "--model", "demo"], "", "The name 'demo' is used twice"),
        (["--model", "a=demo", "--model", "b=demo", "--lora", "x=y/z"], "", "The name 'x' is used twice"),
        (["--model", "demo"], "models: {a: demo}", "cannot be combined"),
        (["--model", "a", "--model", "b", "--served-model-name", "c"], "", "Write --model NAME=FOLDER"),
        ([], "models: {demo: {aliases: [b]}, b: demo}", "The name 'b' is used twice"),
        ([], "models: {a: demo, a: demo}", "'models.a' is set twice"),
        ([], "models: {a: {pinned: true}}", "^models: 'a' has no `model`\\. Set it"),
        (["--model", "b="], "", "`--model b=` has no model. Write --model NAME=FOLDER"),
        (["--model", "=demo"], "", "`--model =demo` has no name"),
        ([], "models: {a: {nonsense: 1}}", "models: 'a': .*nonsense"),
        ([], "models: [a]", "must map names to options"),
        ([], "models: {a: {b: {c: {d: e}}}}", "nested too deeply"),
        (["--memory-limit", "1m"], "", "--memory-limit: the model 'demo' needs about"),
        (["--memory-limit", "12x"], "", "or one with a unit, such as 800m or 12g"),
        (["--idle-unload", "0"], "", "must be above 0"),
    ],
)
def test_invalid_models_are_refused_at_the_start(configured, words, file, message):
    with pytest.raises((ConfigError, click.UsageError), match=message):
        create_engine(*configured(*words, file=file))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-batch-sise: 4", r"line 5: models: 'b': .*max_batch_sise: is not a known option .* 'max_batch_size'\?"),
        ("max-num-seqs: 4", r"line 5: models: 'b': .* It is `max_batch_size` here\."),
        ("max-batch-size: 0", r"line 5: models: 'b': .*max_batch_size: must be at least 1"),
        ("pinned: maybe", r"line 5: models: 'b': `pinned` must be true or false"),
        ("alias: [c]", r"line 5: models: 'b': `alias` is not a known option\. Did you mean `aliases`\?$"),
        ("model: demo\n  c: {pinned: true}\n  d:", r"line 6: models: 'c' has no `model`"),
        ("port: 5", r"line 5: models: 'b': `port` is an option of the server\. Move it out of `models`"),
        ("memory_limit: 5g", r"line 5: models: 'b': `memory_limit` is an option of the server"),
        ("quantization:", r"line 5: 'models\.b\.quantization' has no value"),
        ("pinned: true\n    pinned: true", r"line 6: 'models\.b\.pinned' is set twice"),
        ("aliases: [a]", r"line 2: The name 'a' is used twice"),
    ],
)
def test_errors_in_models_of_a_file_name_the_line(tmp_path, text, message):
    file = tmp_path / "options.yaml"
    file.write_text(f"port: 0\nmodels:\n  a: demo\n  b:\n    {text}\n    model: demo\n")
    result = CliRunner().invoke(click.Group(commands={"serve": plugin.serve}), ["serve", "--config", str(file)])
    assert isinstance(result.exception, ConfigError), result.output
    assert re.search(rf"options\.yaml, {message}", result.exception.message)
