"""The key file: its format, limits of keys, and changes while the server runs."""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import signal
import socket
import threading

import openai
import pytest
from fastapi.testclient import TestClient

from dashinfer_vlm_core.engine.remote import RemoteEngine
from dashinfer_vlm_core.errors import ConfigError
from dashinfer_vlm_server import api_keys, create_app
from dashinfer_vlm_server.api_keys import ApiKeys, KeyLimits
from dashinfer_vlm_server.serving import _on_hangup
from dashinfer_vlm_server.settings import Settings
from tests.clock import ManualClock
from tests.server.conftest import serving
from tests.server.test_metrics import sample
from tests.server.test_serve import process, wait_until_ready
from tests.waiting import HANG, NEVER, until

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
CHAT = "/v1/chat/completions"
LONG = "A long answer. " * 100


def auth(key):
    return {"Authorization": f"Bearer {key}"}


def status(client, key, path="/version"):
    return client.get(path, headers=auth(key)).status_code


def chat(client, key, **fields):
    return client.post(CHAT, json=HELLO | fields, headers=auth(key))


# The format


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o604, True), (0o602, True)])
def test_security_17_key_file_that_others_can_access_is_logged(tmp_path, caplog, mode, warned):
    file = tmp_path / "keys"
    file.write_text("secret-key")
    file.chmod(mode)
    ApiKeys([], file)
    assert (f"All users of this machine can read or change the API keys in {file}." in caplog.text) is warned
    assert "secret-key" not in caplog.text


def test_key_file_lines_can_have_limits(tmp_path):
    file = tmp_path / "keys"
    file.write_text(
        "# comment\nplain\n  first=key==  name=alice max_requests=4\ttokens_per_minute=none media_workers=1\n"
        "given max_requests=none\nplain\n"
    )
    defaults = KeyLimits(max_requests=2, tokens_per_minute=1000)
    keys = ApiKeys(["given", "other"], file, limits=defaults)
    assert len(keys) == 4
    plain, first, given, other = (keys.find(b"Bearer " + key) for key in (b"plain", b"first=key==", b"given", b"other"))
    assert (plain.limits, plain.name) == (defaults, "")
    assert (first.limits, first.name) == (KeyLimits(max_requests=4, media_workers=1), "alice")
    assert given.limits == KeyLimits(tokens_per_minute=1000)
    assert other.limits == defaults
    assert "first=key" not in repr(first) + repr(vars(keys))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("sk max_request=1", "unknown option 'max_request'"),
        ("sk SECRET9=1", "unknown option. The options are name, max_requests"),
        ("sk SECRET9", "a key must not contain spaces"),
        ("sk # SECRET9", "a key must not contain spaces"),
        ("name=alice", "an option without a key"),
        ("sk name=", "`name` must have 1 to 64 characters"),
        ("sk name=a/b", "`name` must have 1 to 64 characters"),
        ("sk name=a name=b", "`name` is given twice"),
        ("sk max_requests=0", "`max_requests` must be a whole number from 1 to 1000000000000, or none, got '0'"),
        ("sk tokens_per_minute=1e9", "`tokens_per_minute` must be"),
        ("sk media_workers=", "`media_workers` must be"),
        ("sk max_requests=" + "9" * 5000, "`max_requests` must be"),
        ("good max_requests=1", "the key is also in"),
        ("SECRET9\x7f", "API keys must have 1 to 4096 printable ASCII characters"),
    ],
)
def test_invalid_line_is_rejected_with_its_number(tmp_path, line, words):
    file = tmp_path / "keys"
    file.write_text(f"# comment\ngood\n\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        ApiKeys([], file)
    assert "line 4: " in caught.value.message
    assert words in caught.value.message
    assert "SECRET9" not in caught.value.message
    assert len(caught.value.message) < 500


# Changes while the server runs


@pytest.fixture
def key_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("sk-old\nsk-kept\n")
    return file


@pytest.fixture
def clock():
    return ManualClock()


def replace_file(file, text):
    """Replace a file as editors and Kubernetes do."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


def test_changed_key_file_is_read_again(scripted, key_file, clock, caplog):
    caplog.set_level(logging.INFO)
    settings = {"keys": ApiKeys(["sk-given"], key_file), "clock": clock}
    with scripted("Fine.", settings=settings).server.http() as client:
        replace_file(key_file, "sk-new\nsk-kept\n")
        assert [status(client, key) for key in ("sk-old", "sk-new")] == [200, 401]  # checked once a second
        clock.advance(1)
        found = {key: status(client, key) for key in ("sk-old", "sk-new", "sk-kept", "sk-given")}
        assert found == {"sk-old": 401, "sk-new": 200, "sk-kept": 200, "sk-given": 200}
    assert "The API keys were read again: 3 keys, 1 added, 1 removed." in caplog.text
    assert "sk-" not in caplog.text


def test_running_response_outlives_its_key(scripted, key_file, clock):
    settings = {"keys": ApiKeys([], key_file), "clock": clock}
    served = scripted("A longer answer. " * 10, delay=0.1, settings=settings)
    with (
        served.server.http() as client,
        client.stream("POST", CHAT, json=HELLO | {"stream": True}, headers=auth("sk-old")) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        replace_file(key_file, "sk-new\n")
        clock.advance(1)
        assert status(client, "sk-old") == 401
        assert served.script.running == 1
        served.script.delay = 0.0
        assert "data: [DONE]" in list(lines)


def break_file(file, content):
    if content is None:
        file.unlink()
    elif content == "pipe":
        file.unlink()
        os.mkfifo(file)
    else:
        file.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("content", [None, b"", b"\xff", b"sk-new unknown=1\n", b"# only a comment\n", "pipe"])
def test_unusable_key_file_keeps_the_previous_keys(scripted, key_file, clock, caplog, content):
    settings = {"keys": ApiKeys([], key_file), "clock": clock}
    with scripted("Fine.", settings=settings).server.http() as client:
        break_file(key_file, content)
        for _ in range(3):
            clock.advance(1)
            assert [status(client, key) for key in ("sk-old", "sk-new")] == [200, 401]
        errors = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert len(errors) == 1
        assert "previous API keys stay valid" in errors[0].message
        assert not errors[0].exc_info
        replace_file(key_file, "sk-new\n")
        clock.advance(1)
        assert [status(client, key) for key in ("sk-old", "sk-new")] == [401, 200]


def test_reload_on_demand_reads_the_file_at_once(scripted, key_file, clock):
    engine = scripted("Fine.").engine
    app = create_app(engine, Settings(keys=ApiKeys([], key_file), clock=clock))
    replace_file(key_file, "sk-new\n")
    app.state.reload_api_keys(force=True)
    with TestClient(app) as client:
        assert [status(client, key) for key in ("sk-old", "sk-new")] == [401, 200]


def test_sighup_runs_its_work_in_a_thread():
    previous, threads, done = signal.getsignal(signal.SIGHUP), [], threading.Event()

    def work():
        threads.append(threading.current_thread())
        done.set()

    try:
        _on_hangup(work)
        signal.raise_signal(signal.SIGHUP)
        assert done.wait(HANG)
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert threads[0] is not threading.main_thread()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sighup_makes_the_server_read_its_keys(tiny_checkpoint, tmp_path, key_file):
    log = tmp_path / "log"
    options = ("--model", tiny_checkpoint, "--served-model-name", "tiny", "--port", 0, "--api-key-file", key_file)
    with process(log, *options) as server:
        wait_until_ready(server, log)
        server.send_signal(signal.SIGHUP)
        until(lambda: "2 keys, 0 added, 0 removed" in log.read_text() or server.poll() is not None)
        assert server.poll() is None
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=HANG) == 0


# Limits


def limited(tmp_path, *lines, **settings):
    file = tmp_path / "keys"
    file.write_text("\n".join(lines))
    return {"keys": ApiKeys([], file), **settings}


def test_concurrent_requests_of_a_key_are_limited(scripted, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    settings = limited(tmp_path, "sk-a name=alice max_requests=1", "sk-b")
    with scripted(LONG, delay=0.1, settings=settings).server.http() as client:
        with client.stream("POST", CHAT, json=HELLO | {"stream": True}, headers=auth("sk-a")) as response:
            lines = response.iter_lines()
            next(lines)
            rejected = chat(client, "sk-a", max_tokens=1)
            assert (rejected.status_code, rejected.headers["Retry-After"]) == (429, "1")
            error = rejected.json()["error"]
            assert (error["type"], error["param"], error["code"]) == ("rate_limit_error", None, "rate_limit_exceeded")
            assert "this API key can run 1 request at a time" in error["message"]
            assert chat(client, "sk-b", max_tokens=1).status_code == 200
            assert status(client, "sk-a", "/v1/models") == 200  # only requests to the engine are limited
            client.headers.update(auth("sk-b"))
            assert sample(client, "rate_limited_requests_total", reason="max_requests") == 1
            assert sample(client, "rate_limited_requests_total", reason="tokens_per_minute") == 0
        until(lambda: chat(client, "sk-a", max_tokens=1).status_code == 200)  # freed by the disconnect
    assert f"POST {CHAT} 429 rejected" in caplog.text
    assert "alice" in caplog.text
    assert "sk-" not in caplog.text


def test_openai_client_raises_rate_limit_error(scripted, tmp_path):
    server = scripted("Fine.", settings=limited(tmp_path, "sk-a tokens_per_minute=1", clock=ManualClock())).server
    with server.openai() as keyless:
        client = keyless.with_options(api_key="sk-a")
        client.chat.completions.create(model="tiny", **HELLO)
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model="tiny", **HELLO)
    assert caught.value.code == "rate_limit_exceeded"


def streamed_usage(response):
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    return next(usage for event in reversed(events) if (usage := json.loads(event).get("usage")))


def test_tokens_per_minute_delay_the_next_request(scripted, tmp_path, clock):
    limit = 20
    settings = limited(tmp_path, f"sk-a tokens_per_minute={limit}", "sk-b", clock=clock)
    with scripted("A red circle.", settings=settings).server.http() as client:
        first = chat(client, "sk-a")
        total = first.json()["usage"]["total_tokens"]
        assert total > limit  # what a request uses is known only later
        rejected = chat(client, "sk-a")
        wait = int(rejected.headers["Retry-After"])
        assert (rejected.status_code, wait) == (429, math.ceil((total - limit + 1) * 60 / limit))
        assert f"can use {limit} tokens per minute. Try again in {wait} seconds." in rejected.json()["error"]["message"]
        assert chat(client, "sk-b").status_code == 200
        assert client.post("/tokenize", json={"prompt": "Hello"}, headers=auth("sk-a")).status_code == 200
        clock.advance(wait - 1)
        assert chat(client, "sk-a").status_code == 429
        clock.advance(1)
        assert chat(client, "sk-a").status_code == 200
        client.headers.update(auth("sk-b"))
        assert sample(client, "rate_limited_requests_total", reason="tokens_per_minute") == 2


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"max_tokens": 2}, {"stop": "red"}])
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_counted_as_in_the_usage(scripted, tmp_path, clock, fields, stream):
    settings = limited(tmp_path, "sk-a tokens_per_minute=6000", clock=clock)
    if stream:
        fields = {**fields, "stream": True, "stream_options": {"include_usage": True}}
    with scripted("A red circle.", settings=settings).server.http() as client:
        first = chat(client, "sk-a", **fields)
        usage = streamed_usage(first) if stream else first.json()["usage"]
        headers = {
            name.removeprefix("x-ratelimit-"): value
            for name, value in client.post(CHAT, json={}, headers=auth("sk-a")).headers.items()
            if name.startswith("x-ratelimit-")
        }
        used = usage["total_tokens"]
        assert headers == {
            "limit-tokens": "6000",
            "remaining-tokens": str(6000 - used),
            "reset-tokens": f"{used * 10}ms" if used < 100 else "1s",
        }
        assert not any(name.startswith("x-ratelimit") for name in client.get("/version", headers=auth("sk-a")).headers)


def remaining(client, key):
    return int(client.post(CHAT, json={}, headers=auth(key)).headers["x-ratelimit-remaining-tokens"])


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_disconnected_request_counts_what_was_generated(scripted, tmp_path, clock, stream):
    settings = limited(tmp_path, "sk-a tokens_per_minute=100000", clock=clock)
    served = scripted(LONG, delay=0.1, settings=settings)
    with served.server.http() as client:
        prompt_tokens = chat(client, "sk-a", max_tokens=1).json()["usage"]["prompt_tokens"]
        before = remaining(client, "sk-a")
        with socket.create_connection(("127.0.0.1", served.server.port), timeout=HANG) as connection:
            body = json.dumps(HELLO | {"stream": stream}).encode()
            head = (
                f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-a\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            connection.sendall(head.encode() + body)
            until(lambda: before - remaining(client, "sk-a") > prompt_tokens)
            served.script.delay = NEVER
            seen = before - remaining(client, "sk-a")
        until(lambda: not served.script.running)
        used = before - remaining(client, "sk-a")
        assert prompt_tokens < used <= seen + 1  # a token was on its way
        assert remaining(client, "sk-a") == before - used


@pytest.mark.slow
@pytest.mark.parametrize(
    "stream", [None, {}, {"include_initial_usage": True}], ids=["complete", "stream", "continuous"]
)
def test_tokens_of_a_remote_engine_are_counted(scripted, tmp_path, clock, stream):
    settings = limited(tmp_path, "sk-a tokens_per_minute=6000", clock=clock)
    fields = {} if stream is None else {"stream": True, "stream_options": {"include_usage": True, **stream}}
    with (
        RemoteEngine(f"{scripted('A red circle.').server.url}/v1") as remote,
        serving(remote, **settings) as server,
        server.http() as client,
    ):
        response = chat(client, "sk-a", **fields)
        usage = response.json()["usage"] if stream is None else streamed_usage(response)
        assert remaining(client, "sk-a") == 6000 - usage["total_tokens"]


def test_limits_change_with_the_key_file(scripted, key_file, clock):
    settings = {"keys": ApiKeys([], key_file, limits=KeyLimits(tokens_per_minute=1)), "clock": clock}
    with scripted("Fine.", settings=settings).server.http() as client:
        assert [chat(client, "sk-kept").status_code for _ in range(2)] == [200, 429]
        replace_file(key_file, "sk-kept tokens_per_minute=none\n")
        clock.advance(1)
        assert [chat(client, "sk-kept").status_code for _ in range(2)] == [200, 200]
        replace_file(key_file, "sk-kept tokens_per_minute=1\n")
        clock.advance(1)
        assert chat(client, "sk-kept").status_code == 429  # what a key has used is kept


def test_two_applications_with_one_engine_count_separately(scripted, tmp_path, clock):
    served = scripted("Fine.", settings=limited(tmp_path, "sk-a tokens_per_minute=6000", clock=clock))
    settings = limited(tmp_path, "sk-a tokens_per_minute=6000", clock=clock)
    with (
        serving(served.engine, **settings) as second,
        served.server.http() as client,
        second.http() as other,
    ):
        used = chat(client, "sk-a").json()["usage"]["total_tokens"]
        assert (remaining(client, "sk-a"), remaining(other, "sk-a")) == (6000 - used, 6000)


def test_keys_have_ids_of_the_process_that_unpickles_them(monkeypatch):
    """Otherwise all keys would seem to change when another process reads their file again."""
    data = pickle.dumps(ApiKeys(["one", "two"], limits=KeyLimits(max_requests=3)))
    monkeypatch.setattr(api_keys, "_ID_SECRET", bytes(32))
    keys = pickle.loads(data)
    assert keys.ids == ApiKeys(["one", "two"]).ids
    assert keys.find(b"Bearer one").limits == KeyLimits(max_requests=3)
