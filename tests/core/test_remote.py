"""`RemoteEngine` with our server behaves like `Engine`; with other servers it reports what is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from dataclasses import replace

import pytest

from dashinfer_vlm_core import Engine, EngineConfig, errors
from dashinfer_vlm_core.engine.remote import RemoteEngine
from dashinfer_vlm_core.protocol import ChatRequest
from dashinfer_vlm_core.testing import Script, scripted_registry
from tests.cases import cases
from tests.server.conftest import serving
from tests.waiting import until
from tests.web import body, raw, serve

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
LONG = "A long answer that goes on and on and on. " * 20

ERRORS = [
    errors.InvalidParameter("`top_p` is wrong.", param="top_p"),
    errors.UnsupportedParameter("`n` cannot be 2.", param="n"),
    errors.ContextLengthExceeded("Too long.", prompt_tokens=9, limit=8),
    errors.ModelNotFound("No such model.", param="model"),
    errors.MediaRefused("Refused.", param="messages[0].content[1]"),
    errors.MediaTooLarge("Too large."),
    errors.MediaUnreachable("Unreachable."),
    errors.MediaUndecodable("Undecodable."),
    errors.QueueFull("Busy.", retry_after=7),
    errors.DeadlineExceeded("Too late."),
    errors.EngineClosed("Closed."),
    errors.DecoderFailed("Dead."),
    errors.EngineError("Failed.", code="internal_error"),
]


@pytest.fixture
def remote(tiny_checkpoint):
    """Start servers whose decoder plays a script, and connect over HTTP: `remote("Yes.")`."""
    with contextlib.ExitStack() as stack:

        def start(*answers, delay=0.0, **options):
            script = Script(*answers, delay=delay)
            config = EngineConfig(model=str(tiny_checkpoint), served_model_name="tiny", decoder="scripted")
            engine = stack.enter_context(Engine(config, registry=scripted_registry(script)))
            server = stack.enter_context(serving(engine))
            return stack.enter_context(RemoteEngine(f"{server.url}/v1", **options)), engine, script

        yield start


@contextlib.contextmanager
def engine_with_response(data, *headers, status="200 OK"):
    """Return an engine whose server sends the same response to every request."""
    answer = body(data, *headers, status=status)
    paths = ("/v1/chat/completions", "/health", "/v1/models")
    with serve(dict.fromkeys(paths, answer)) as web, RemoteEngine(web.url("/v1")) as engine:
        yield engine


def fields(reply):
    return reply.model_dump(exclude={"id", "created"})


async def collect(stream):
    return [chunk async for chunk in stream]


def test_all_entry_points_give_the_engines_completion(remote):
    engine, local, _ = remote("Yes, and no.")
    request = HELLO | {"logprobs": True, "stream_options": {"include_usage": True}, "stream": True}
    whole = HELLO | {"logprobs": True}
    expected = fields(local.chat(whole))
    for asked in (whole, ChatRequest.parse(whole)):
        assert fields(engine.chat(asked)) == expected
        assert fields(asyncio.run(engine.achat(asked))) == expected
    chunks = [fields(chunk) for chunk in local.stream(request)]
    assert [fields(chunk) for chunk in engine.stream(request)] == chunks
    assert [fields(chunk) for chunk in asyncio.run(collect(engine.astream(ChatRequest.parse(request))))] == chunks


@pytest.mark.parametrize(
    ("said", "state"), [("loading", "loading"), ("restarting", "restarting"), ("draining", "closed")]
)
def test_unavailable_server_reports_reason(said, state):
    health = json.dumps({"status": said, "model": "tiny"}).encode()
    with engine_with_response(health, "Content-Type: application/json", status="503 Service Unavailable") as engine:
        status = engine.status()
    assert (status.state, status.model) == (state, "tiny")


def test_status_is_the_servers(remote):
    engine, local, _ = remote("Yes.")
    assert engine.status() == replace(local.status(), max_parallel=1)  # `/health` does not tell
    local.close()
    assert engine.status().state == "closed"


@pytest.fixture(scope="module")
def failing(tiny_checkpoint):
    """A remote engine, and a list of the errors that its next requests raise."""
    raised = []

    def respond(request):
        if raised:
            raise raised.pop()
        return "Fine."

    config = EngineConfig(model=str(tiny_checkpoint), decoder="scripted")
    with (
        Engine(config, registry=scripted_registry(Script(respond))) as engine,
        serving(engine) as server,
        RemoteEngine(f"{server.url}/v1") as remote,
    ):
        yield remote, raised


@cases("error", ERRORS)
def test_errors_round_trip(failing, error):
    engine, raised = failing
    raised += [error, error]
    for ask in (lambda: engine.chat(HELLO), lambda: list(engine.stream(HELLO))):
        with pytest.raises(type(error)) as caught:
            ask()
        assert type(caught.value) is type(error)
        assert (caught.value.message, caught.value.code) == (error.message, error.code)
        assert caught.value.param == error.param
        assert getattr(caught.value, "retry_after", None) == getattr(error, "retry_after", None)
    assert engine.chat(HELLO).choices[0].message.content == "Fine."


def test_error_during_stream_is_raised(remote):
    engine, local, script = remote(LONG, delay=0.05)
    stream = engine.stream(HELLO)
    next(stream)
    local.close()
    with pytest.raises(errors.EngineClosed):
        list(stream)
    assert script.running == 0


def test_closing_stream_cancels_on_server(remote):
    engine, _, script = remote(LONG, delay=0.1)
    stream = engine.stream(HELLO)
    next(stream)
    assert script.running == 1
    stream.close()
    until(lambda: script.running == 0)

    async def leave():
        task = asyncio.create_task(engine.achat(HELLO))
        await asyncio.to_thread(until, lambda: script.running == 1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    until(lambda: script.running == 0)


@pytest.mark.slow
def test_silent_server_times_out(remote):
    engine, _, script = remote(LONG, delay=30, timeout=0.5)
    with pytest.raises(errors.DeadlineExceeded):
        engine.chat(HELLO)
    until(lambda: script.running == 0)


def test_close_ends_running_requests(remote):
    engine, _, _ = remote(LONG, delay=0.1)
    stream = engine.stream(HELLO)
    next(stream)
    engine.close()
    engine.close()
    with pytest.raises(errors.EngineClosed):
        list(stream)


@cases(
    ("status", "error", "kind"),
    [
        ("400 Bad Request", {"message": "Wrong.", "param": "top_p", "code": 400}, errors.InvalidParameter),
        ("401 Unauthorized", {"message": "Which key?"}, errors.AccessDenied),
        ("403 Forbidden", {"message": "Not you."}, errors.AccessDenied),
        ("404 Not Found", {"message": "No model."}, errors.ModelNotFound),
        ("422 Unprocessable Entity", {"message": "Wrong."}, errors.InvalidParameter),
        ("429 Too Many Requests", {"message": "Busy."}, errors.QueueFull),
        ("500 Internal Server Error", {"message": "Oh."}, errors.EngineError),
        ("502 Bad Gateway", None, errors.EngineClosed),
        ("503 Service Unavailable", {"message": "Later."}, errors.EngineClosed),
        ("504 Gateway Timeout", {"message": "Late."}, errors.DeadlineExceeded),
    ],
)
def test_errors_of_other_servers_are_mapped_by_status(status, error, kind):
    data = b"<html>" if error is None else json.dumps({"error": error}).encode()
    with engine_with_response(data, "Content-Type: application/json", status=status) as engine:
        with pytest.raises(kind) as caught:
            engine.chat(HELLO)
        assert type(caught.value) is kind
        assert caught.value.message == (error or {"message": caught.value.message})["message"]
        with pytest.raises(kind):
            list(engine.stream(HELLO))
        assert engine.status().state == "failed"


@pytest.mark.parametrize("data", [b"<html>Hello</html>", b"{}", b"{", b'{"choices": []}'])
def test_invalid_response_is_reported(data):
    with engine_with_response(
        data, "Content-Type: text/html" if b"html" in data else "Content-Type: application/json"
    ) as engine:
        with pytest.raises(errors.EngineError, match="/v1"):
            engine.chat(HELLO)
        with pytest.raises(errors.EngineError):
            list(engine.stream(HELLO))
        assert engine.status().state == "failed"


def test_invalid_embedding_and_page_are_reported():
    embedding = json.dumps({"data": [{"index": 0, "embedding": "AAAAAAA="}]}).encode()
    page = b'data: {"page": 1}\n\n'
    answers = {
        "/v1/embeddings": body(embedding, "Content-Type: application/json"),
        "/v1/ocr": body(page, "Content-Type: text/event-stream"),
    }
    with serve(answers) as web, RemoteEngine(web.url("/v1")) as engine:
        with pytest.raises(errors.EngineError, match="/v1"):
            asyncio.run(engine.aembed({"input": "a"}))
        with pytest.raises(errors.EngineError, match="/v1"):
            next(engine.ocr({"document": {"document_url": "https://a.org/b.pdf"}}))


def test_other_server_reports_its_model():
    model = {"id": "other", "object": "model", "created": 1, "owned_by": "x", "max_model_len": 4096}
    data = json.dumps({"object": "list", "data": [model]}).encode()
    with engine_with_response(data, "Content-Type: application/json") as engine:
        status = engine.status()
    assert (status.state, status.model, status.max_model_len) == ("ready", "other", 4096)


def test_unreachable_server_error_hides_address():
    with RemoteEngine("http://127.0.0.1:9/v1") as engine:
        with pytest.raises(errors.EngineClosed) as caught:
            engine.chat(HELLO)
        assert caught.value.code == "connection_error"
        assert "127.0.0.1" not in caught.value.message
        assert engine.status().state == "failed"


CHUNK = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
PIECE = b"data: " + json.dumps(CHUNK | {"choices": [{"index": 0, "delta": {"content": "A"}}]}).encode() + b"\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "pieces",
    [
        (b"%x\r\n%s\r\n" % (len(PIECE), PIECE),),
        (b"%x\r\n%s\r\n" % (len(PIECE), PIECE), b"0\r\n\r\n"),
        (b"%x\r\n" % len(PIECE), PIECE[:20]),
    ],
    ids=["cut off", "ended without a reason", "cut off in a chunk"],
)
def test_truncated_stream_is_an_error(pieces):
    with serve({"/v1/chat/completions": raw(HEAD, *pieces)}) as web, RemoteEngine(web.url("/v1")) as engine:
        with pytest.raises(errors.EngineError) as caught:
            list(engine.stream(HELLO))
        assert caught.value.retryable


@pytest.mark.slow
def test_silence_in_stream_times_out():
    ended = threading.Event()
    writer = raw(HEAD, b"%x\r\n%s\r\n" % (len(PIECE), PIECE), then=ended.wait)
    with serve({"/v1/chat/completions": writer}) as web, RemoteEngine(web.url("/v1"), timeout=0.5) as engine:
        with pytest.raises(errors.DeadlineExceeded):
            list(engine.stream(HELLO))
        ended.set()


def test_only_the_given_api_key_is_sent():
    os.environ |= {"OPENAI_API_KEY": "somebody's", "OPENAI_ORG_ID": "somebody's"}
    with serve({"/v1/chat/completions": body(b"{}")}) as web:
        for key in (None, "mine"):
            with RemoteEngine(web.url("/v1"), api_key=key) as engine, pytest.raises(errors.EngineError):
                engine.chat(HELLO)
    heads = [head.lower() for head in web.requests]
    assert "authorization: bearer none" in heads[0]
    assert "authorization: bearer mine" in heads[1]
    assert not any("somebody" in head for head in heads)


@pytest.mark.parametrize("address", ["", "127.0.0.1:8000/v1", "ftp://host/v1", "http://"])
def test_invalid_base_url_is_rejected(address):
    with pytest.raises(errors.ConfigError, match="api_base"):
        RemoteEngine(address)
