"""Rule 27: a web page cannot use a server without API keys, by other origins, DNS rebinding or plain-text bodies."""

from __future__ import annotations

import contextlib
import json
from typing import NamedTuple

import httpx
import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.errors import ConfigError
from dashinfer_vlm_core.testing import Script, scripted_registry
from dashinfer_vlm_server import create_app
from dashinfer_vlm_server.api_keys import ApiKeys
from dashinfer_vlm_server.plugin import serve
from dashinfer_vlm_server.settings import Settings
from dashinfer_vlm_server.sockets import Address, open_listener
from tests.server.conftest import RunningServer, serving
from tests.waiting import HANG

CHAT = "/v1/chat/completions"
HELLO = json.dumps({"messages": [{"role": "user", "content": "Hello"}]})
KEY = "sk-0123456789abcdef"
KEY_HEADER = {"Authorization": f"Bearer {KEY}"}


class Served(NamedTuple):
    engine: Engine
    script: Script


@pytest.fixture(scope="module")
def served(tiny_checkpoint):
    script = Script("Fine.")
    config = EngineConfig(model=str(tiny_checkpoint), decoder="scripted")
    with Engine(config, registry=scripted_registry(script)) as engine:
        yield Served(engine, script)


@contextlib.contextmanager
def client_of(served, **settings):
    with serving(served.engine, **settings) as server, server.http() as client:
        yield client


@pytest.fixture(scope="module")
def client(served):
    """A client of a server with the default settings."""
    with client_of(served) as client:
        yield client


def rejection(served, client, status, code, **headers):
    """Assert that a chat request is rejected before it reaches the engine. Return the message."""
    received = len(served.script.requests)
    response = client.post(CHAT, content=HELLO, headers={name.replace("_", "-"): v for name, v in headers.items()})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, None), error
    assert len(served.script.requests) == received
    return error["message"]


FOREIGN_HOSTS = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "evillocalhost",
    "localhost@evil.example",
    "[evil.example]",
    "127.0.0.1:8000:evil",
    "0x7f.1",
    "",
]


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
def test_security_27_foreign_host_is_rejected(served, client, host):
    message = rejection(served, client, 403, "host_not_allowed", Host=host)
    assert "`--allowed-hosts`" in message
    for path in ("/", "/v1/models", "/metrics", "/nothing"):
        assert client.get(path, headers={"Host": host}).status_code == 403
    for path in ("/health", "/health/ready"):
        assert client.get(path, headers={"Host": host}).status_code == 200


OWN_HOSTS = [
    "localhost",
    "LOCALHOST:8000",
    "localhost.",
    "app.localhost:1",
    "127.0.0.1",
    "127.9.9.9:80",
    "[::1]:8000",
    "192.168.1.2:8000",
    "[fe80::1]",
]


@pytest.mark.parametrize("host", OWN_HOSTS)
def test_security_27_loopback_names_and_addresses_are_accepted(client, host):
    assert client.post(CHAT, content=HELLO, headers={"Host": host}).status_code == 200


def test_security_27_allowed_hosts_are_accepted(served):
    with client_of(served, allowed_hosts=("Vision.lan", "*.corp.example")) as client:
        for host in ("vision.lan:8000", "VISION.LAN", "a.corp.example", "a.b.corp.example"):
            assert client.post(CHAT, content=HELLO, headers={"Host": host}).status_code == 200
        for host in ("corp.example", "avision.lan", "a.vision.lan", "acorp.example"):
            rejection(served, client, 403, "host_not_allowed", Host=host)
    with client_of(served, allowed_hosts=("*",)) as client:
        assert client.post(CHAT, content=HELLO, headers={"Host": "evil.example"}).status_code == 200
        rejection(served, client, 403, "origin_not_allowed", Host="a.example", Origin="http://b.example")


@pytest.mark.parametrize("name", ["http://a.example", "a.example:8000", "a/b", "*a", "a,*.*", "[::1]"])
def test_security_27_allowed_hosts_must_be_names(served, name):
    with pytest.raises(ConfigError, match="--allowed-hosts"):
        create_app(served.engine, Settings(allowed_hosts=(name,)))


FOREIGN_ORIGINS = [
    "null",
    "http://evil.example",
    "http://localhost:8001",
    "http://localhost",
    "https://localhost:80000",
    "http://127.0.0.1:8000",
    "http://localhost:8000.evil.example",
    "http://localhost:8000/",
    "file://",
    "chrome-extension://localhost:8000",
    "localhost:8000",
    "",
]


@pytest.mark.parametrize("origin", FOREIGN_ORIGINS)
def test_security_27_foreign_origin_is_rejected(served, origin):
    with client_of(served, allowed_origins=("https://page.example",)) as client:
        message = rejection(served, client, 403, "origin_not_allowed", Host="localhost:8000", Origin=origin)
    assert "`--allowed-origins`" in message


def test_security_27_own_and_allowed_origins_are_accepted(served):
    own = [
        ("localhost:8000", "http://localhost:8000"),
        ("LocalHost:8000", "http://localhost:8000"),
        ("localhost", "http://localhost"),
        ("localhost:443", "https://localhost"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("localhost:8000", "https://page.example"),
    ]
    with client_of(served, allowed_origins=("https://page.example",)) as client:
        for host, origin in own:
            response = client.post(CHAT, content=HELLO, headers={"Host": host, "Origin": origin})
            assert response.status_code == 200, (host, origin)
    with client_of(served, allowed_origins=("*",)) as client:
        assert client.post(CHAT, content=HELLO, headers={"Origin": "null"}).status_code == 200


def test_security_27_rejection_is_readable_by_an_allowed_page(served):
    page = "https://page.example"
    with client_of(served, allowed_origins=(page,)) as client:
        response = client.post(CHAT, content=HELLO, headers={"Host": "evil.example", "Origin": page})
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (403, page)


def test_security_27_repeated_origin_is_checked(client):
    headers = [("Host", "localhost"), ("Origin", "http://localhost"), ("Origin", "http://evil.example")]
    assert client.post(CHAT, content=HELLO, headers=headers).status_code == 403


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a", "application/jsonx", ""],
)
@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/detokenize", "/v1/media/preview"])
def test_security_27_body_must_be_declared_as_json(client, kind, path):
    for body in (HELLO, iter([HELLO.encode()])):  # with a length, and chunked
        response = client.post(path, content=body, headers={"Content-Type": kind})
        assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")
        assert "Content-Type: application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/json ;a=b"])
def test_security_27_content_type_parameters_and_case_are_ignored(client, kind):
    assert client.post(CHAT, content=HELLO, headers={"Content-Type": kind}).status_code == 200


def test_security_27_only_routes_that_exist_require_json(client):
    for path, status in (("/v1/files", 404), ("/v1/responses/resp_1/cancel", 415), ("/v1/models", 415)):
        response = client.post(path, content=b"--x--", headers={"Content-Type": "multipart/form-data; boundary=x"})
        assert response.status_code == status


def test_security_27_missing_content_type_is_rejected(served):
    """A page can send a body without a type, as a `Blob`."""
    with client_of(served) as client:
        del client.headers["Content-Type"]
        rejection(served, client, 415, "unsupported_media_type")


def test_security_27_server_with_keys_checks_only_the_key(served):
    with client_of(served, keys=ApiKeys([KEY])) as client:
        headers = {"Host": "a.example", "Origin": "http://b.example", "Content-Type": "text/plain"}
        assert client.post(CHAT, content=HELLO, headers=headers | KEY_HEADER).status_code == 200
        rejection(served, client, 401, "invalid_api_key", **headers)


def test_security_27_unix_socket_checks_only_the_origin(served, tmp_path):
    address = Address(uds=tmp_path / "socket")
    with open_listener(address) as listener:
        server = RunningServer(create_app(served.engine), address, listener)
        transport = httpx.HTTPTransport(uds=str(address.uds))
        with server.running(), httpx.Client(transport=transport, base_url="http://server", timeout=HANG) as client:
            client.headers["Content-Type"] = "application/json"
            assert client.post(CHAT, content=HELLO).status_code == 200
            rejection(served, client, 403, "origin_not_allowed", Origin="http://evil.example")


def test_security_27_command_allows_its_hosts():
    """`--host` with a name allows that name."""
    from dashinfer_vlm_server import plugin

    with serve.make_context("serve", ["--host", "box.lan", "--allowed-hosts", "A.example, *.b.example"]) as context:
        assert plugin.create_settings(context.params, EngineConfig()).allowed_hosts == (
            "A.example",
            "*.b.example",
            "box.lan",
        )
    with serve.make_context("serve", ["--host", "::"]) as context:
        assert plugin.create_settings(context.params, EngineConfig()).allowed_hosts == ()
