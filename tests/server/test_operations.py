"""What operators rely on: health, names of requests, keys, origins, sockets, TLS, counts of tokens."""

from __future__ import annotations

import json
import logging
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from dashinfer_vlm_core import Engine, EngineConfig, __version__
from dashinfer_vlm_core.errors import ConfigError
from dashinfer_vlm_core.testing import Script, scripted_registry
from dashinfer_vlm_server.api_keys import ApiKeys
from dashinfer_vlm_server.logs import JsonFormatter, TextFormatter
from dashinfer_vlm_server.serving import Server, http_settings
from dashinfer_vlm_server.settings import DrainState, Settings
from dashinfer_vlm_server.sockets import Address, TlsConfig, open_listener
from tests.samples import image_url
from tests.server.conftest import RunningServer, create_app
from tests.waiting import HANG, until

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
CHAT = "/v1/chat/completions"


# Health


def test_it_is_alive_and_not_ready_while_the_model_loads(tiny_checkpoint):
    go = threading.Event()

    class Slow(Engine):
        def start(self):
            self._loading = True
            go.wait(timeout=HANG)
            return super().start()

    script = Script("Fine.")
    engine = Slow(EngineConfig(model=str(tiny_checkpoint), decoder="scripted"), registry=scripted_registry(script))
    gate = DrainState()
    settings = http_settings(create_app(engine, drain_state=gate), Address())
    settings.port = 0
    server = Server(settings, engine=engine, drain_state=gate, grace=0.2)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    with httpx.Client(base_url=url, trust_env=False, timeout=HANG) as client:
        until(lambda: client.get("/health").json()["status"] == "loading")
        assert client.get("/health").status_code == 200
        ready, asked = client.get("/health/ready"), client.post(CHAT, json=HELLO)
        assert (ready.status_code, ready.json()["status"], ready.headers["retry-after"]) == (503, "loading", "5")
        assert (asked.status_code, asked.json()["error"]["code"]) == (503, "engine_loading")
        go.set()
        until(lambda: client.get("/health/ready").status_code == 200)
        assert client.post(CHAT, json=HELLO).status_code == 200
    server.should_exit = True
    thread.join(timeout=HANG)
    assert not thread.is_alive()
    engine.close()


def test_a_draining_server_says_so_and_begins_nothing(tiny_checkpoint):
    gate = DrainState()
    script = scripted_registry(Script("Fine."))
    with Engine(EngineConfig(model=str(tiny_checkpoint), decoder="scripted"), registry=script) as engine:
        server = RunningServer(create_app(engine, drain_state=gate))
        with server.running(), server.http() as client:
            assert client.get("/health/ready").status_code == 200
            gate.draining = True
            replies = [client.get("/health"), client.get("/health/ready"), client.post(CHAT, json=HELLO)]
    assert [reply.status_code for reply in replies] == [200, 503, 503]
    assert replies[1].json()["status"] == "draining"
    assert replies[2].json()["error"]["code"] == "draining"


def test_the_version_is_told(scripted):
    with scripted("Fine.").server.http() as client:
        assert client.get("/version").json() == {"version": __version__}


# HEAD


@pytest.mark.parametrize(
    "path", ["/", "/health", "/health/ready", "/v1/models", "/v1/models/tiny", "/version", "/metrics"]
)
def test_head_is_answered_as_get_without_a_body(scripted, path):
    with scripted("Fine.").server.http() as client:
        whole, head = client.get(path), client.head(path)
        assert (head.status_code, head.headers["content-type"]) == (200, whole.headers["content-type"])
        if path != "/metrics":
            assert head.headers["content-length"] == str(len(whole.content))
        with socket.create_connection((client.base_url.host, client.base_url.port)) as bare:
            bare.sendall(f"HEAD {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n".encode())
            assert bare.makefile("rb").read().endswith(b"\r\n\r\n")


def test_head_needs_a_key_where_get_does_and_names_what_is_not_there(scripted):
    with scripted("Fine.", settings={"keys": ApiKeys(["right"])}).server.http() as client:
        assert [client.head(path).status_code for path in ("/health", "/v1/models")] == [200, 401]
        client.headers["Authorization"] = "Bearer right"
        replies = [client.head(path) for path in ("/v1/models", "/v1/models/none", "/nothing", CHAT)]
        counted = client.get("/metrics").text
    assert [reply.status_code for reply in replies] == [200, 404, 404, 405]
    assert 'requests_total{outcome="unauthorized",route="/v1/models"} 1.0' in counted
    assert 'requests_total{outcome="success",route="/v1/models"} 1.0' in counted


# Names of requests


@pytest.mark.parametrize("name", ["abc-1", "7f.x:Y_z", "a" * 128])
def test_a_request_keeps_the_name_that_it_came_with(scripted, name):
    with scripted("Fine.").server.http() as client:
        for reply in (
            client.post(CHAT, json=HELLO, headers={"X-Request-Id": name}),
            client.post(CHAT, json=HELLO | {"stream": True}, headers={"X-Request-Id": name}),
            client.post(CHAT, json={}, headers={"X-Request-Id": name}),
            client.get("/nothing", headers={"X-Request-Id": name}),
        ):
            assert reply.headers["x-request-id"] == name


@pytest.mark.parametrize("name", ["", "a b", "a" * 129, "é".encode(), 'x"y', "a\tb"])
def test_a_name_that_no_log_should_hold_is_replaced(scripted, name):
    with scripted("Fine.").server.http() as client:
        reply = client.get("/version", headers={"X-Request-Id": name})
    assert reply.headers["x-request-id"].startswith("req-")
    assert len(reply.headers["x-request-id"]) == 36


def test_openais_client_knows_the_name(scripted):
    with scripted("Fine.").server.openai() as client:
        answer = client.chat.completions.create(model="tiny", messages=HELLO["messages"])
        assert answer._request_id.startswith("req-")
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=[])
        assert caught.value.request_id.startswith("req-")


# Logs


def test_a_line_of_json_says_what_became_of_a_request(scripted, caplog):
    caplog.set_level(logging.INFO)
    with scripted("Fine.").server.http() as client:
        client.post(CHAT, json=HELLO, headers={"X-Request-Id": "one"})
        client.get("/health")
    (record,) = [record for record in caplog.records if record.name == "dashinfer_vlm_server.request_context"]
    line = json.loads(JsonFormatter().format(record))
    assert {"method": "POST", "route": CHAT, "status": 200, "outcome": "success"}.items() <= line.items()
    assert line["level"] == "info"
    assert line["seconds"] < 30
    assert "POST /v1/chat/completions 200 success" in TextFormatter("%(message)s").format(record)


def test_the_engines_lines_name_the_request_too(scripted, tmp_path):
    """Its stages run in another thread, and on another event loop."""
    handler = logging.FileHandler(tmp_path / "log")
    handler.setFormatter(JsonFormatter())
    logging.getLogger().addHandler(handler)
    try:
        with scripted(lambda request: 1 / 0).server.http() as client:
            assert client.post(CHAT, json=HELLO, headers={"X-Request-Id": "the-one"}).status_code == 500
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    failed = next(line for line in lines if line["logger"] == "dashinfer_vlm_core.engine.chat_pipeline")
    assert failed["request_id"] == "the-one"
    assert "ZeroDivisionError" in failed["exception"]


# Keys


def test_keys_of_a_file_open_and_others_do_not(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# of the team\nfirst\n\n second \n")
    keys = ApiKeys.read(["third"], file)
    assert len(keys) == 3
    assert all(keys.is_valid(b"Bearer " + key) for key in (b"first", b"second", b"third"))
    assert not any(keys.is_valid(value) for value in (b"", b"first", b"Bearer", b"Bearer fourth", b"Basic first"))


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read: No such file"), (b"", "holds no key"), (b"\xff", "no UTF-8"), (b"a\tb", "printable")],
)
def test_a_file_without_usable_keys_is_refused(tmp_path, content, words):
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        ApiKeys.read([], file)


def test_openais_client_brings_its_key(scripted):
    server = scripted("Fine.", settings={"keys": ApiKeys(["right"])}).server
    with server.openai() as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert caught.value.code == "invalid_api_key"
        assert client.with_options(api_key="right").models.list().data[0].id == "tiny"


# Origins


def test_pages_of_other_origins_are_shut_out_unless_they_are_named(scripted):
    page = {"Origin": "https://page.example"}
    asks = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with scripted("Fine.").server.http() as client:
        assert "access-control-allow-origin" not in client.get("/version", headers=page).headers
    settings = {"allowed_origins": ("https://page.example",), "keys": ApiKeys(["right"])}
    with scripted("Fine.", settings=settings).server.http() as client:
        assert client.options(CHAT, headers=asks).headers["access-control-allow-origin"] == "https://page.example"
        refused = client.post(CHAT, json=HELLO, headers=page)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://page.example")
        assert "access-control-allow-origin" not in client.get("/version", headers={"Origin": "https://x"}).headers


# Addresses


def served(engine, address, **settings):
    """A server on an address of any kind."""
    server = RunningServer(create_app(engine, Settings(**settings)), address)
    return server.running()


@pytest.fixture
def engine(tiny_checkpoint):
    registry = scripted_registry(Script("Fine."))
    with Engine(EngineConfig(model=str(tiny_checkpoint), decoder="scripted"), registry=registry) as engine:
        yield engine


def test_a_root_path_is_that_of_the_proxy_in_front(engine):
    """The proxy takes the prefix off; keys are asked for all the same."""
    with served(engine, Address(root_path="/vision"), keys=ApiKeys(["right"])) as server, server.http() as client:
        assert client.get("/version", headers={"Authorization": "Bearer right"}).status_code == 200
        assert client.get("/health").status_code == 200
        assert client.get("/version").status_code == 401


@pytest.mark.parametrize("mode", [0o600, 0o660])
def test_a_unix_socket_is_for_those_whom_its_permissions_let_in(engine, tmp_path, mode):
    address = Address(path=tmp_path / "socket", mode=mode)
    with open_listener(address) as listener:
        assert address.path.stat().st_mode & 0o777 == mode
        server = RunningServer(create_app(engine), address, listener)
        transport = httpx.HTTPTransport(uds=str(address.path))
        with server.running(), httpx.Client(transport=transport, base_url="http://server", timeout=HANG) as client:
            assert client.post(CHAT, json=HELLO).json()["choices"][0]["message"]["content"] == "Fine."
    assert not address.path.exists()


def test_the_socket_of_a_server_that_was_killed_is_replaced_and_no_other(tmp_path):
    address = Address(path=tmp_path / "socket")
    with open_listener(address) as first:
        first.listen()
        with pytest.raises(ConfigError, match="in use"), open_listener(address):
            pass
        first.close()
        with open_listener(address):
            assert address.path.is_socket()
    address.path.write_text("precious")
    with pytest.raises(ConfigError, match="in use"), open_listener(address):
        pass
    assert address.path.read_text() == "precious"


PEM = Path(__file__).parents[1] / "pictures_test.pem"


def test_tls_encrypts(engine):
    with served(engine, Address(tls=TlsConfig(certificate=PEM))) as server:
        trust = ssl.create_default_context(cafile=str(PEM))
        trust.check_hostname = False
        url = server.url.replace("http:", "https:")
        with httpx.Client(verify=trust, base_url=url, trust_env=False, timeout=HANG) as client:
            assert client.post(CHAT, json=HELLO).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{server.url}/health", trust_env=False)


def test_a_client_without_a_certificate_is_turned_away_where_one_is_asked_for(engine):
    with served(engine, Address(tls=TlsConfig(certificate=PEM, client_authorities=PEM))) as server:
        trust = ssl.create_default_context(cafile=str(PEM))
        trust.check_hostname = False
        url = server.url.replace("http:", "https:")
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{url}/health", verify=trust, trust_env=False)
        trust.load_cert_chain(PEM)
        assert httpx.get(f"{url}/health", verify=trust, trust_env=False).status_code == 200


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_certificate_that_cannot_be_used_is_named(engine, tmp_path, content):
    file = tmp_path / "cert.pem"
    if content:
        file.write_text(content)
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        http_settings(create_app(engine), Address(tls=TlsConfig(certificate=file)))


# Tokens


def test_a_prompt_is_counted_and_comes_back(engine, tiny_checkpoint):
    text = "<|im_start|>user\nHello<|im_end|>"
    with served(engine, Address()) as server, server.http() as client:
        answer = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert answer["count"] == len(answer["tokens"])
        assert "".join(answer["token_strs"]) == text.replace("\n", "Ċ")  # as byte-level vocabularies spell it
        assert answer["token_strs"][0] == "<|im_start|>"
        assert answer["max_model_len"] == engine.status().max_model_len
        assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}


def test_messages_are_counted_with_their_pictures_as_the_answer_counts_them(engine):
    content = [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": image_url(60, 90)}}]
    body = {"messages": [{"role": "user", "content": content}]}
    with served(engine, Address()) as server, server.http() as client:
        counted = client.post("/tokenize", json=body).json()
        assert engine.stats().vision.passes == 0
        usage = client.post(CHAT, json=body).json()["usage"]
    assert counted["count"] == usage["prompt_tokens"]
    assert usage["prompt_tokens_details"]["image_tokens"] > 0


BAD_COUNTS = {
    "nothing": ("/tokenize", {}, "prompt"),
    "both": ("/tokenize", {"prompt": "a", **HELLO}, "prompt"),
    "a number": ("/tokenize", {"prompt": 1}, "prompt"),
    "half a surrogate pair": ("/tokenize", '{"prompt": "\\ud800"}', "prompt"),
    "a template": ("/tokenize", {**HELLO, "chat_template": "x"}, "chat_template"),
    "another model": ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
    "far too long": ("/tokenize", {"prompt": "word " * 100_000}, "messages"),
    "no tokens": ("/detokenize", {}, "tokens"),
    "a text as tokens": ("/detokenize", {"tokens": "a"}, "tokens"),
    "an unknown token": ("/detokenize", {"tokens": [320]}, "tokens"),
    "a negative token": ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    "no array": ("/detokenize", "[]", None),
}


@pytest.mark.parametrize(("path", "body", "param"), BAD_COUNTS.values(), ids=BAD_COUNTS)
def test_what_cannot_be_counted_is_refused_by_name(scripted, path, body, param):
    with scripted("Fine.").server.http() as client:
        reply = client.post(path, content=body if isinstance(body, str) else json.dumps(body))
    assert reply.status_code == (404 if param == "model" else 400), reply.text
    assert reply.json()["error"]["param"] == param


# Deadlines


def test_a_preview_has_to_be_there_in_time(scripted):
    served = scripted("Never asked.", settings={"request_timeout": 1e-9})
    with served.server.http() as client:
        reply = client.post("/v1/media/preview", json=HELLO)
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_to_be_there_in_time(scripted, stream):
    served = scripted("A long answer. " * 50, "Fine.", delay=0.1, settings={"request_timeout": 10 * HANG})
    with served.server.http() as client, ThreadPoolExecutor(1) as pool:
        begun = threading.Event()
        answer = pool.submit(read, client, HELLO | {"stream": stream}, begun)
        until(lambda: begun.is_set() if stream else served.script.running)
        served.server.loop.skip(11 * HANG)
        status, text = answer.result(timeout=HANG)
        until(lambda: served.script.running == 0)
    served.script.delay = 0.0
    with served.server.http() as client:
        assert client.post(CHAT, json=HELLO).status_code == 200
    error = json.loads(text.rsplit("data: ", 1)[-1])["error"]
    assert status == (200 if stream else 504)
    assert error["code"] == "deadline_exceeded"
    assert "[DONE]" not in text


def read(client, request, begun):
    """The status and the body of an answer; `begun` is set at its first piece."""
    with client.stream("POST", CHAT, json=request) as reply:
        text = ""
        for piece in reply.iter_text():
            begun.set()
            text += piece
        return reply.status_code, text


# Types


CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("answer", "options"),
    [
        ("Fine.", {}),
        ("Fine.", {"n": 2, "logprobs": True, "top_logprobs": 1, "stream_options": {"include_usage": True}}),
        (f"Let me see. {CALL}", {"tools": [LOOK]}),
    ],
    ids=["plain", "everything listed", "calls"],
)
def test_openais_types_read_every_answer(scripted, answer, options):
    """Checked here: their client builds its objects of whatever comes."""
    with scripted(*[answer] * 4).server.http() as client:
        whole = {name: value for name, value in options.items() if name != "stream_options"}
        completion = ChatCompletion.model_validate_json(client.post(CHAT, json=HELLO | whole).content)
        events = client.post(CHAT, json=HELLO | options | {"stream": True}).text.split("\n\n")
        chunks = [ChatCompletionChunk.model_validate_json(event.removeprefix("data: ")) for event in events[:-2]]
        models = [Model.model_validate(model) for model in client.get("/v1/models").json()["data"]]
    assert len(completion.choices) == options.get("n", 1)
    assert bool(completion.choices[0].message.tool_calls) == ("tools" in options)
    assert any(chunk.choices and chunk.choices[0].delta.tool_calls for chunk in chunks) == ("tools" in options)
    assert bool(completion.choices[0].logprobs) == ("logprobs" in options)
    assert bool(chunks[-1].usage) == ("stream_options" in options)
    assert [model.id for model in models] == ["tiny"]
