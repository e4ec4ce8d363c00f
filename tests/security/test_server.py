"""Rules 17 to 22: keys, limits of bodies and headers, overload, labels and logs, checkpoints, sockets."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import hmac
import itertools
import json
import logging
import pickle
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from dashinfer_vlm_core import Engine, EngineConfig, hookimpl
from dashinfer_vlm_core.config import MIB
from dashinfer_vlm_core.decoders import Decoder, DecoderSupport
from dashinfer_vlm_core.errors import CheckpointError, DecoderFailed
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_core.testing import Script, scripted_registry
from dashinfer_vlm_dashinfer import process
from dashinfer_vlm_server import create_app
from dashinfer_vlm_server.api_keys import ApiKeys
from dashinfer_vlm_server.endpoint import Endpoint
from dashinfer_vlm_server.endpoints.page import FILES
from dashinfer_vlm_server.http_protocol import MAX_HEAD_BYTES
from tests.samples import image_url
from tests.security.conftest import LEAKS
from tests.server.conftest import serving
from tests.tiny import write_checkpoint
from tests.waiting import HANG, until

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
CHAT = "/v1/chat/completions"
KEY = "sk-0123456789abcdef"


@contextlib.contextmanager
def scripted_server(
    checkpoint: Path, *responses: Any, delay: float = 0.0, engine_options: dict[str, Any] | None = None, **settings
):
    """Serve an engine with a scripted decoder. Yields the server, a client, the script and the engine."""
    script = Script(*responses, delay=delay)
    config = EngineConfig(model=str(checkpoint), decoder="scripted", **(engine_options or {}))
    engine = Engine(config, registry=scripted_registry(script))
    with engine, serving(engine, **settings) as server, server.http() as client:
        yield server, client, script, engine


def routes(app) -> list[tuple[str, str]]:
    """Return every method and path of the application."""
    return [
        (method, route.path.replace("{name:path}", "x"))
        for route in app.routes
        if isinstance(route, Endpoint)
        for method in sorted(route.methods or ())
    ]


def test_security_17_routes_require_the_key(tiny_checkpoint):
    with scripted_server(tiny_checkpoint, "Fine.", keys=ApiKeys([KEY])) as (_, client, _, engine):
        files = [("GET", path) for path in FILES]
        known = routes(create_app(engine))
        assert len(known) >= 10
        unknown = [("GET", "/nothing"), ("GET", "/health/../metrics"), ("GET", "//health/x")]
        for method, path in [*known, *files, *unknown]:
            public = path in {"/health", "/health/ready", "/page/{name}", *FILES}
            is_anthropic = path.startswith("/v1/messages") or (method, path) in unknown
            other_header = [] if is_anthropic else [{"X-Api-Key": KEY}]  # Anthropic's header
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, *other_header):
                reply = client.request(method, path, headers=headers)
                assert (reply.status_code != 401) == public, (method, path, reply.text)
                expected = "" if method == "HEAD" else "invalid_api_key"
                assert public or expected in reply.text
            reply = client.request(method, path, headers={"Authorization": f"Bearer {KEY}"})
            assert reply.status_code != 401


@pytest.mark.parametrize(
    "headers",
    [
        [("Authorization", "Bearer wrong"), ("Authorization", f"Bearer {KEY}")],
        [("Authorization", f"Bearer {KEY}"), ("Authorization", "Bearer wrong")],
        [("Authorization", f"Bearer {KEY[:-1]}")],
        [("Authorization", f"Bearer {KEY}x")],
        [("Authorization", "Bearer")],
        [("Authorization", f"Basic {KEY}")],
        [("Host", "health"), ("X-Original-Url", "/health")],
        [("X-Forwarded-Prefix", "/health"), ("X-Rewrite-Url", "/health")],
    ],
)
def test_security_17_invalid_credentials_are_rejected(tiny_checkpoint, headers):
    with scripted_server(tiny_checkpoint, "Fine.", keys=ApiKeys([KEY])) as (_, client, script, _):
        assert client.post(CHAT, json=HELLO, headers=headers).status_code == 401
        assert not script.requests
        assert client.post(CHAT, json=HELLO, headers={"Authorization": f"bearer {KEY}"}).status_code == 200


def test_security_17_keys_are_compared_by_digest_in_constant_time(monkeypatch):
    """Only `hmac.compare_digest` decides, on digests, so a prefix of a key reveals nothing."""
    keys = ApiKeys([KEY, "other"])
    assert KEY not in repr(vars(keys)) + repr(keys)
    known = {hashlib.sha256(key.encode()).digest() for key in (KEY, "other")}
    compared, decision = [], False

    def compare(one, other):
        compared.append((one, other))
        return decision

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for sent in (KEY, KEY[:-1] + "x", "x" * len(KEY), "other"):
        for decision in (True, False):
            compared.clear()
            assert (keys.find(b"Bearer " + sent.encode()) is not None) is decision
            assert {one for one, _ in compared} == {hashlib.sha256(sent.encode()).digest()}
            assert {other for _, other in compared} == known


def test_security_18_large_body_or_head_is_rejected(tiny_checkpoint):
    with scripted_server(tiny_checkpoint, "Fine.", max_body_mib=10_000 / MIB) as (server, client, script, _):
        assert client.post(CHAT, content=b" " * 10_001).status_code == 413
        with socket.create_connection(("127.0.0.1", server.port), timeout=HANG) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(b"GET /health HTTP/1.1\r\nX: " + b"a" * MAX_HEAD_BYTES * 4)
            with contextlib.suppress(OSError):
                assert connection.recv(100).startswith(b"HTTP/1.1 400")
        assert not script.requests
        assert client.post(CHAT, json=HELLO).status_code == 200


@pytest.mark.parametrize("path", ["/v1", "/v2/models", "/v1/chat/completions/", "/docs", "/redoc", "/%00", "/..%2f"])
def test_security_18_unknown_path_returns_openai_error(tiny_checkpoint, path):
    with scripted_server(tiny_checkpoint, "Fine.") as (_, client, _, _):
        reply = client.get(path)
    assert reply.status_code == 404
    assert reply.json()["error"].keys() == {"message", "type", "param", "code"}


def test_security_18_error_contains_no_stack_trace(tiny_checkpoint):
    def broken(_request):
        raise RuntimeError("/etc/secret at 0x7f00")

    with scripted_server(tiny_checkpoint, broken) as (_, client, _, _):
        for body in (HELLO, HELLO | {"stream": True}):
            reply = client.post(CHAT, json=body)
            assert reply.status_code == 500
            assert not LEAKS.search(reply.text), reply.text


def test_security_19_full_queue_sets_retry_after(tiny_checkpoint):
    options = {"max_batch_size": 1, "max_waiting": 1}
    with scripted_server(tiny_checkpoint, "word " * 200, delay=0.2, engine_options=options) as (
        server,
        client,
        script,
        _,
    ):
        busy = [connect(server) for _ in range(2)]
        until(lambda: script.running == 2)
        reply = client.post(CHAT, json=HELLO)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        assert reply.json()["error"]["type"] == "rate_limit_error"
        for connection in busy:
            connection.close()


def connect(server):
    body = json.dumps(HELLO | {"stream": True}).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=HANG)
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    connection.sendall(head % (CHAT.encode(), len(body)) + body)
    return connection


def test_security_19_disconnect_frees_the_slot(tiny_checkpoint):
    """The slot is free long before the response would end, which takes minutes."""
    with scripted_server(tiny_checkpoint, "word " * 500, delay=1.0) as (server, _, script, engine):
        connection = connect(server)
        until(lambda: script.running == 1)
        connection.close()
        until(lambda: engine.stats().active_requests == 0)


class Dying(Decoder):
    """A decoder that fails permanently on its first request, and its plugin."""

    name, supported_params, unsupported_vision_reason, fatal_error = "dying", frozenset(), "", ""

    @hookimpl
    def register_decoders(self, register):
        register(self)

    def check_support(self, spec, config):
        return DecoderSupport(score=1, reason="a test")

    def create(self, spec, config, kernels):
        self.max_model_len = spec.max_model_len
        return self

    async def start(self):
        """Do nothing."""

    async def close(self):
        """Do nothing."""

    async def decode(self, request):
        self.fatal_error = "The decoder is dead."
        raise DecoderFailed("The decoder has died.")
        yield


def test_security_19_dead_decoder_returns_503_and_health_reports_it(tiny_checkpoint):
    registry = load_plugins()
    registry.add_plugin(Dying(), name="dying")
    config = EngineConfig(model=str(tiny_checkpoint), decoder="dying", limits={"decoder_restarts": 0})
    with Engine(config, registry=registry) as engine, serving(engine) as server, server.http() as client:
        assert client.get("/health/ready").status_code == 200
        assert client.post(CHAT, json=HELLO).status_code == 503
        until(lambda: client.get("/health").json()["status"] == "failed")
        assert client.get("/health/ready").status_code == 503
        health = client.get("/health").json()
        assert health["fatal_error"] == "The decoder is dead."
        again = client.post(CHAT, json=HELLO)
        assert (again.status_code, again.json()["error"]["code"]) == (503, "decoder_failed")


def test_security_20_requests_create_no_new_labels(tiny_checkpoint):
    with scripted_server(tiny_checkpoint, "Fine.") as (_, client, _, _):

        def series() -> set[tuple[str, ...]]:
            families = text_string_to_metric_families(client.get("/metrics").text)
            return {(s.name, *itertools.chain(*sorted(s.labels.items()))) for f in families for s in f.samples}

        def send_requests(tag: str) -> None:
            for path in (f"/{tag}", f"/v1/models/{tag}", f"/v1/{tag}/x", CHAT):
                client.get(path, headers={"X-Request-Id": tag, "User-Agent": tag})
            client.request(tag, "/health")
            client.post(CHAT, json=HELLO | {"model": tag, "user": tag})
            client.post(CHAT, json=HELLO)

        send_requests("first")
        client.get("/metrics")
        before = series()
        for index in range(20):
            send_requests(f"tag{index}")
        assert series() == before


SECRETS = ("a very private prompt", KEY, "private-host.example", "iVBORw0KGgo", "Fine response.")


def test_security_20_logs_contain_no_private_data(tiny_checkpoint, caplog):
    caplog.set_level(logging.INFO)
    parts = [
        {"type": "text", "text": SECRETS[0]},
        {"type": "image_url", "image_url": {"url": image_url()}},
    ]
    content = [{"role": "user", "content": parts}]
    remote = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"https://{SECRETS[2]}/a"}}]}]
    bearer = {"Authorization": f"Bearer {KEY}"}
    with scripted_server(tiny_checkpoint, "Fine response.", keys=ApiKeys([KEY])) as (_, client, _, _):
        for body in ({"messages": content}, {"messages": content, "stream": True}, {"messages": content, "n": 0}):
            client.post(CHAT, json=body, headers=bearer)
        client.post(CHAT, json={"messages": remote}, headers=bearer)
        client.post(CHAT, content=SECRETS[0], headers=bearer)
        client.post("/tokenize", json={"prompt": SECRETS[0]}, headers=bearer)
        client.post(CHAT, json={"messages": content}, headers={"Authorization": f"Bearer {KEY}x"})
        client.get(f"/{SECRETS[0]}?key={KEY}", headers=bearer)
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert len(ours) >= 8
    assert not [line for line in ours for secret in SECRETS if secret in line]


def test_security_20_unknown_method_is_not_logged(tiny_checkpoint, caplog):
    caplog.set_level(logging.DEBUG, "dashinfer_vlm_server")
    with scripted_server(tiny_checkpoint, "Fine.") as (_, client, _, _):
        assert client.request("A" * 60_000, "/version").status_code == 405
        assert client.request("A" * 60_000, f"/{'b' * 1000}").status_code == 404
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("dashinfer_vlm_server")]
    assert [line.split(" ")[:3] for line in lines] == [["other", "/version", "405"], ["other", "other", "404"]]


def test_security_21_pickle_checkpoint_is_not_read(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    trap = tmp_path / "sprung"

    class Trap:
        def __reduce__(self):
            return (Path.touch, (trap,))

    for name in ("pytorch_model.bin", "model.pt"):
        torch.save({"weights": torch.zeros(1)}, folder / name)
        (folder / name).write_bytes(pickle.dumps(Trap()))
    with pytest.raises(CheckpointError):
        Engine(EngineConfig(model=str(folder), decoder="torch")).start()
    assert not trap.exists()


def test_security_21_checkpoint_code_is_not_run(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    trap = tmp_path / "sprung"
    (folder / "trap.py").write_text(f"open({str(trap)!r}, 'w')\nclass T: pass\n")
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((folder / name).read_text())
        values["auto_map"] = {"AutoConfig": "trap.T", "AutoModel": "trap.T", "AutoTokenizer": ["trap.T", "trap.T"]}
        (folder / name).write_text(json.dumps(values))
    with Engine(EngineConfig(model=str(folder), decoder="torch")) as engine:
        assert engine.chat(HELLO | {"max_tokens": 1}).usage.completion_tokens == 1
    assert not trap.exists()


SOURCES = [
    path
    for folder in ("dashinfer_vlm_core", "adapters", "plugins")
    for path in (Path(__file__).parents[2] / folder).rglob("*.py")
]


@pytest.mark.slow
def test_security_22_no_module_unpickles():
    assert len(SOURCES) > 80
    for path in SOURCES:
        imported = {
            alias.name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in ([ast.alias(node.module or "")] if isinstance(node, ast.ImportFrom) else node.names)
        }
        assert not imported & {"pickle", "shelve", "marshal", "dill", "cloudpickle", "multiprocessing"}, path
        assert not re.search(r"torch\.load\((?!.*weights_only=True)", path.read_text(encoding="utf-8")), path


def test_security_22_worker_uses_an_unnamed_socket_pair():
    source = Path(process.__file__).read_text(encoding="utf-8")
    assert "socket.socketpair()" in source
    assert ".bind(" not in source
