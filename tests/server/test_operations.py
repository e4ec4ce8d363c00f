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
from dashinfer_vlm_server.serving import Server, uvicorn_config
from dashinfer_vlm_server.settings import DrainState, Settings
from dashinfer_vlm_server.sockets import Address, open_listener
from tests.cases import cases
from tests.pdfs import document
from tests.samples import data_url, image_url
from tests.server.conftest import RunningServer, create_app
from tests.waiting import HANG, NEVER, until

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def engine(tiny_checkpoint):
    config = EngineConfig(model=str(tiny_checkpoint), served_model_name="tiny", decoder="scripted")
    with Engine(config, registry=scripted_registry(Script("Fine."))) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine):
    """A client of a server with the default settings."""
    with served(engine, Address()) as server, server.http() as client:
        yield client


# Health


def test_server_is_live_but_not_ready_while_loading(tiny_checkpoint):
    proceed = threading.Event()

    class SlowEngine(Engine):
        def start(self):
            self._loading = True
            proceed.wait(timeout=HANG)
            return super().start()

    script = Script("Fine.")
    engine = SlowEngine(
        EngineConfig(model=str(tiny_checkpoint), decoder="scripted"), registry=scripted_registry(script)
    )
    drain_state = DrainState()
    settings = uvicorn_config(create_app(engine, drain_state=drain_state), Address())
    settings.port = 0
    server = Server(settings, engine=engine, drain_state=drain_state, grace=0.2)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    with httpx.Client(base_url=url, trust_env=False, timeout=HANG) as client:
        until(lambda: client.get("/health").json()["status"] == "loading")
        assert client.get("/health").status_code == 200
        ready, chat = client.get("/health/ready"), client.post(CHAT, json=HELLO)
        assert (ready.status_code, ready.json()["status"], ready.headers["retry-after"]) == (503, "loading", "5")
        assert (chat.status_code, chat.json()["error"]["code"]) == (503, "engine_loading")
        proceed.set()
        until(lambda: client.get("/health/ready").status_code == 200)
        assert client.post(CHAT, json=HELLO).status_code == 200
    server.should_exit = True
    thread.join(timeout=HANG)
    assert not thread.is_alive()
    engine.close()


def test_draining_server_rejects_new_requests(tiny_checkpoint):
    drain_state = DrainState()
    script = scripted_registry(Script("Fine."))
    with Engine(EngineConfig(model=str(tiny_checkpoint), decoder="scripted"), registry=script) as engine:
        server = RunningServer(create_app(engine, drain_state=drain_state))
        with server.running(), server.http() as client:
            assert client.get("/health/ready").status_code == 200
            drain_state.draining = True
            responses = [client.get("/health"), client.get("/health/ready"), client.post(CHAT, json=HELLO)]
    assert [response.status_code for response in responses] == [200, 503, 503]
    assert responses[1].json()["status"] == "draining"
    assert responses[2].json()["error"]["code"] == "draining"


def test_version_route(scripted):
    with scripted("Fine.").server.http() as client:
        assert client.get("/version").json() == {"version": __version__}


# HEAD


@cases("path", ["/", "/health", "/health/ready", "/v1/models", "/v1/models/tiny", "/version", "/metrics"])
def test_head_matches_get_without_a_body(client, path):
    whole, head = client.get(path), client.head(path)
    assert (head.status_code, head.headers["content-type"]) == (200, whole.headers["content-type"])
    if path != "/metrics":
        assert head.headers["content-length"] == str(len(whole.content))
    with socket.create_connection((client.base_url.host, client.base_url.port)) as bare:
        bare.sendall(f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert bare.makefile("rb").read().endswith(b"\r\n\r\n")


def test_head_requires_a_key_and_reports_unknown_urls(scripted):
    with scripted("Fine.", settings={"keys": ApiKeys(["right"])}).server.http() as client:
        assert [client.head(path).status_code for path in ("/health", "/v1/models")] == [200, 401]
        client.headers["Authorization"] = "Bearer right"
        responses = [client.head(path) for path in ("/v1/models", "/v1/models/none", "/nothing", CHAT)]
        counted = client.get("/metrics").text
    assert [response.status_code for response in responses] == [200, 404, 404, 405]
    assert 'requests_total{outcome="unauthorized",route="/v1/models"} 1.0' in counted
    assert 'requests_total{outcome="success",route="/v1/models"} 1.0' in counted


# Request IDs


@pytest.mark.parametrize("name", ["abc-1", "7f.x:Y_z", "a" * 128])
def test_valid_request_id_is_kept(client, name):
    for response in (
        client.post(CHAT, json=HELLO, headers={"X-Request-Id": name}),
        client.post(CHAT, json=HELLO | {"stream": True}, headers={"X-Request-Id": name}),
        client.post(CHAT, json={}, headers={"X-Request-Id": name}),
        client.get("/nothing", headers={"X-Request-Id": name}),
    ):
        assert response.headers["x-request-id"] == name


@cases("name", ["", "a b", "a" * 129, "é".encode(), 'x"y', "a\tb"])
def test_invalid_request_id_is_replaced(client, name):
    response = client.get("/version", headers={"X-Request-Id": name})
    assert response.headers["x-request-id"].startswith("req-")
    assert len(response.headers["x-request-id"]) == 36


def test_openai_client_reads_the_request_id(scripted):
    with scripted("Fine.").server.openai() as client:
        response = client.chat.completions.create(model="tiny", messages=HELLO["messages"])
        assert response._request_id.startswith("req-")
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=[])
        assert caught.value.request_id.startswith("req-")


# Logs


def test_json_log_line_of_a_request(scripted, caplog):
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


def test_engine_log_lines_have_the_request_id(scripted, tmp_path):
    """The engine runs in another thread, on another event loop."""
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
    failed = next(line for line in lines if line["logger"] == "dashinfer_vlm_core.engine.admission")
    assert failed["request_id"] == "the-one"
    assert "ZeroDivisionError" in failed["exception"]


# Keys


def test_api_keys_from_a_file_are_valid(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# of the team\nfirst\n\n second \n")
    keys = ApiKeys(["third"], file)
    assert len(keys) == 3
    assert all(keys.find(b"Bearer " + key) for key in (b"first", b"second", b"third"))
    assert not any(keys.find(value) for value in (b"", b"first", b"Bearer", b"Bearer fourth", b"Basic first"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file"),
        (b"", "contains no key"),
        (b"\xff", "not UTF-8"),
        (b"a\x7fb", "line 1: API keys must have"),
    ],
)
def test_key_file_without_valid_keys_is_rejected(tmp_path, content, words):
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        ApiKeys([], file)


def test_openai_client_sends_its_key(scripted):
    server = scripted("Fine.", settings={"keys": ApiKeys(["right"])}).server
    with server.openai() as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert caught.value.code == "invalid_api_key"
        assert client.with_options(api_key="right").models.list().data[0].id == "tiny"


# Origins


def test_cors_allows_only_listed_origins(scripted):
    page = {"Origin": "https://page.example"}
    headers = "anthropic-dangerous-direct-browser-access,authorization,x-stainless-os"
    preflight = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": headers}
    with scripted("Fine.").server.http() as client:
        assert "access-control-allow-origin" not in client.get("/version", headers=page).headers
    settings = {"allowed_origins": ("https://page.example",), "keys": ApiKeys(["right"])}
    with scripted("Fine.", settings=settings).server.http() as client:
        allowed = client.options(CHAT, headers=preflight)
        assert (allowed.status_code, allowed.headers["access-control-allow-headers"]) == (200, headers)
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        rejected = client.post(CHAT, json=HELLO, headers=page)
        assert (rejected.status_code, rejected.headers["access-control-allow-origin"]) == (401, "https://page.example")
        assert "access-control-allow-origin" not in client.get("/version", headers={"Origin": "https://x"}).headers


# Addresses


def served(engine, address, **settings):
    """Serve `engine` on any kind of address."""
    server = RunningServer(create_app(engine, Settings(**settings)), address)
    return server.running()


def test_root_path_is_stripped_by_the_proxy(engine):
    """The proxy strips the prefix; keys are still required."""
    with served(engine, Address(root_path="/vision"), keys=ApiKeys(["right"])) as server, server.http() as client:
        assert client.get("/version", headers={"Authorization": "Bearer right"}).status_code == 200
        assert client.get("/health").status_code == 200
        assert client.get("/version").status_code == 401


def test_unix_socket_is_for_its_owner_only(engine, tmp_path):
    address = Address(uds=tmp_path / "socket")
    with open_listener(address) as listener:
        assert address.uds.stat().st_mode & 0o777 == 0o600
        server = RunningServer(create_app(engine), address, listener)
        transport = httpx.HTTPTransport(uds=str(address.uds))
        with server.running(), httpx.Client(transport=transport, base_url="http://server", timeout=HANG) as client:
            assert client.post(CHAT, json=HELLO).json()["choices"][0]["message"]["content"] == "Fine."
    assert not address.uds.exists()


def test_only_a_stale_unix_socket_is_replaced(tmp_path):
    address = Address(uds=tmp_path / "socket")
    with open_listener(address) as first:
        first.listen()
        with pytest.raises(ConfigError, match="in use"), open_listener(address):
            pass
        first.close()
        with open_listener(address):
            assert address.uds.is_socket()
    address.uds.write_text("precious")
    with pytest.raises(ConfigError, match="in use"), open_listener(address):
        pass
    assert address.uds.read_text() == "precious"


PEM = Path(__file__).parents[1] / "pictures_test.pem"


def test_tls(engine):
    with served(engine, Address(ssl_certfile=PEM)) as server:
        trust = ssl.create_default_context(cafile=str(PEM))
        trust.check_hostname = False
        url = server.url.replace("http:", "https:")
        with httpx.Client(verify=trust, base_url=url, trust_env=False, timeout=HANG) as client:
            assert client.post(CHAT, json=HELLO).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{server.url}/health", trust_env=False)


def test_client_certificate_is_required(engine):
    with served(engine, Address(ssl_certfile=PEM, ssl_ca_certs=PEM)) as server:
        trust = ssl.create_default_context(cafile=str(PEM))
        trust.check_hostname = False
        url = server.url.replace("http:", "https:")
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{url}/health", verify=trust, trust_env=False)
        trust.load_cert_chain(PEM)
        assert httpx.get(f"{url}/health", verify=trust, trust_env=False).status_code == 200


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_unusable_certificate_is_named(engine, tmp_path, content):
    file = tmp_path / "cert.pem"
    if content:
        file.write_text(content)
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        uvicorn_config(create_app(engine), Address(ssl_certfile=file))


# Tokens


def test_tokenize_and_detokenize_a_prompt(engine, tiny_checkpoint):
    text = "<|im_start|>user\nHello<|im_end|>"
    with served(engine, Address()) as server, server.http() as client:
        response = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert response["count"] == len(response["tokens"])
        assert "".join(response["token_strs"]) == text.replace("\n", "Ċ")  # as in byte-level vocabularies
        assert response["token_strs"][0] == "<|im_start|>"
        assert response["max_model_len"] == engine.status().max_model_len
        assert client.post("/detokenize", json={"tokens": response["tokens"]}).json() == {"prompt": text}


def test_tokenize_counts_image_tokens_like_usage(engine, client):
    content = [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": image_url(60, 90)}}]
    pages = data_url(document("One", "Two", size=(84, 84)), "application/pdf")
    content.append({"type": "file", "file": {"file_data": pages}})
    body = {"messages": [{"role": "user", "content": content}]}
    passes = engine.stats().vision.passes
    counted = client.post("/tokenize", json=body).json()
    assert engine.stats().vision.passes == passes
    usage = client.post(CHAT, json=body).json()["usage"]
    assert counted["count"] == usage["prompt_tokens"]
    assert usage["prompt_tokens_details"]["image_tokens"] > 0


BAD_TOKENIZE_REQUESTS = {
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


@cases(("path", "body", "param"), BAD_TOKENIZE_REQUESTS.values())
def test_bad_tokenize_request_names_the_field(client, path, body, param):
    response = client.post(path, content=body if isinstance(body, str) else json.dumps(body))
    assert response.status_code == (404 if param == "model" else 400), response.text
    assert response.json()["error"]["param"] == param


# Deadlines


def test_preview_times_out(scripted):
    served = scripted("Never sent.", settings={"request_timeout": 1e-9})
    with served.server.http() as client:
        response = client.post("/v1/media/preview", json=HELLO)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize("stream", [False, True])
def test_response_times_out(scripted, stream):
    served = scripted("A long answer. " * 50, "Fine.", delay=0.1, settings={"request_timeout": 10 * HANG})
    with served.server.http() as client, ThreadPoolExecutor(1) as pool:
        started = threading.Event()
        response = pool.submit(read, client, HELLO | {"stream": stream}, started)
        until(lambda: started.is_set() if stream else served.script.running)
        served.script.delay = NEVER
        served.server.loop.skip(11 * HANG)
        status, text = response.result(timeout=HANG)
        until(lambda: served.script.running == 0)
    served.script.delay = 0.0
    with served.server.http() as client:
        assert client.post(CHAT, json=HELLO).status_code == 200
    error = json.loads(text.rsplit("data: ", 1)[-1])["error"]
    assert status == (200 if stream else 504)
    assert error["code"] == "deadline_exceeded"
    assert "[DONE]" not in text


def read(client, request, started):
    """Return the status and body of a response; set `started` at its first chunk."""
    with client.stream("POST", CHAT, json=request) as response:
        text = ""
        for chunk in response.iter_text():
            started.set()
            text += chunk
        return response.status_code, text


# Types


TOOL_CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("response", "options"),
    [
        ("Fine.", {}),
        ("Fine.", {"n": 2, "logprobs": True, "top_logprobs": 1, "stream_options": {"include_usage": True}}),
        (f"Let me see. {TOOL_CALL}", {"tools": [TOOL]}),
    ],
    ids=["plain", "everything listed", "calls"],
)
def test_openai_types_parse_every_response(scripted, response, options):
    """Validated here, because their client constructs its objects without validation."""
    with scripted(*[response] * 4).server.http() as client:
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
