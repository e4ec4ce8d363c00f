"""Error responses: the status, OpenAI's body, and no internal details."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from dashinfer_vlm_core import ChatEngine, EngineStatus, errors
from dashinfer_vlm_core.protocol.name_log import NameLog
from dashinfer_vlm_core.testing import scripted_engine
from dashinfer_vlm_server import query
from dashinfer_vlm_server.errors import INTERNAL_ERROR, error_body, error_response, status_for
from tests.cases import cases
from tests.server.conftest import serving

HELLO = [{"role": "user", "content": "Hello"}]
SECRET = "/home/somebody/secret"

STATUSES = {
    errors.RequestError: 400,
    errors.InvalidParameter: 400,
    errors.UnsupportedParameter: 400,
    errors.ContextLengthExceeded: 400,
    errors.ModelNotFound: 404,
    errors.MediaError: 400,
    errors.MediaRefused: 400,
    errors.MediaTooLarge: 400,
    errors.MediaUnreachable: 400,
    errors.MediaUndecodable: 400,
    errors.EngineError: 500,
    errors.QueueFull: 429,
    errors.DeadlineExceeded: 504,
    errors.EngineClosed: 503,
    errors.DecoderFailed: 503,
    errors.SetupError: 500,
    errors.ConfigError: 500,
    errors.CheckpointError: 500,
    errors.MissingDependency: 501,
    errors.AccessDenied: 500,
    errors.PluginError: 500,
}

CLIENT_CLASSES = {
    errors.InvalidParameter: openai.BadRequestError,
    errors.MediaRefused: openai.BadRequestError,
    errors.ModelNotFound: openai.NotFoundError,
    errors.QueueFull: openai.RateLimitError,
    errors.DecoderFailed: openai.InternalServerError,
    errors.DeadlineExceeded: openai.InternalServerError,
    errors.CheckpointError: openai.InternalServerError,
}


def make(kind):
    arguments = {"prompt_tokens": 9, "limit": 8} if kind is errors.ContextLengthExceeded else {}
    return kind("What is wrong.", **arguments)


def family(kind):
    return {kind}.union(*(family(child) for child in kind.__subclasses__()))


def test_every_error_class_has_a_status():
    assert family(errors.DashInferVLMError) - {errors.DashInferVLMError} == STATUSES.keys()
    assert {kind: status_for(make(kind)) for kind in STATUSES} == STATUSES


@cases("kind", STATUSES)
def test_error_type_matches_the_status(kind):
    error = error_body(make(kind))["error"]
    expected = {429: "rate_limit_error"}.get(
        STATUSES[kind], "server_error" if STATUSES[kind] >= 500 else "invalid_request_error"
    )
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == expected


def test_internal_details_are_not_sent_to_the_client():
    assert error_body(errors.CheckpointError(SECRET))["error"]["message"] == INTERNAL_ERROR
    assert error_body(ValueError(SECRET))["error"]["message"] == INTERNAL_ERROR
    assert error_body(errors.MissingDependency("pip install x"))["error"]["message"] == "pip install x"


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (1.2, "2"), (30, "30")])
def test_queue_full_sets_retry_after(seconds, header):
    assert error_response(errors.QueueFull("Busy.", retry_after=seconds)).headers["retry-after"] == header


@pytest.fixture(scope="module")
def failing(tiny_checkpoint):
    """A server, and a list of the errors that its next requests raise."""
    raised = []

    def respond(request):
        if raised:
            raise raised.pop()
        return "Fine."

    engine = scripted_engine(respond, model=str(tiny_checkpoint), served_model_name="tiny")
    with engine, serving(engine) as server:
        yield server, raised


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", CLIENT_CLASSES)
def test_openai_client_raises_its_error_classes(failing, kind, stream):
    server, raised = failing
    raised.append(make(kind))
    with server.openai() as client:
        with pytest.raises(CLIENT_CLASSES[kind]) as caught:
            client.chat.completions.create(model="tiny", messages=HELLO, stream=stream)
        assert caught.value.status_code == STATUSES[kind]
        assert caught.value.code == error_body(make(kind))["error"]["code"]
        assert client.chat.completions.create(model="tiny", messages=HELLO).choices[0].message.content == "Fine."


def test_unknown_url_and_method_return_openai_errors(scripted):
    with scripted("Fine.").server.http() as client:
        missing = client.get("/v1/nothing")
        wrong = [client.get("/v1/chat/completions"), client.delete("/v1/models"), client.post("/health")]
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "unknown_url"
    assert "POST /v1/chat/completions" in missing.json()["error"]["message"]
    assert [response.status_code for response in wrong] == [405, 405, 405]
    allowed = [sorted(response.headers["allow"].split(", ")) for response in wrong]
    assert allowed == [["POST"], ["GET", "HEAD"], ["GET", "HEAD"]]
    assert wrong[1].json()["error"]["message"] == "This URL supports GET and HEAD only."
    assert wrong[0].json()["error"] == {
        "message": "This URL supports POST only.",
        "type": "invalid_request_error",
        "param": None,
        "code": "method_not_allowed",
    }


def test_unknown_urls_have_the_errors_of_their_protocol(scripted):
    with scripted("Fine.").server.http() as client:
        ollama = client.post("/api/blobs/sha256:0", json={})
        anthropic = client.post("/v1/messages/batches", json={})
    assert (ollama.status_code, ollama.json()["error"][:12]) == (404, "Unknown URL.")
    assert (anthropic.status_code, anthropic.json()["type"]) == (404, "error")
    assert anthropic.json()["error"]["type"] == "not_found_error"
    assert "Send the requests to /v1/messages" in anthropic.json()["error"]["message"]


def test_unknown_query_parameters_are_logged_once(scripted, monkeypatch, caplog):
    monkeypatch.setattr(query, "_LOG", NameLog(query.logger, "%s", "No more."))
    with scripted("Fine.").server.http() as client:
        for _ in range(2):
            assert client.get("/v1/models?api-version=preview&limit=5").status_code == 200
            client.get("/v1/responses/resp_1?stream=true&after=1")
            client.post("/v1/messages?beta=true", json={})
    logged = [record.getMessage() for record in caplog.records if record.name == query.__name__]
    assert logged == ["'limit'", "'after'"]


SIMILAR = {
    "/v1/chat/completion": "/v1/chat/completions",
    "/v1/v1/chat/completions": "/v1/chat/completions",
    "/v1/model/tiny": "/v1/models",
    "/metric": "/metrics",
}


def test_404_names_a_similar_route_and_where_all_are_listed(scripted):
    with scripted("Fine.").server.http() as client:
        for path, similar in SIMILAR.items():
            message = client.get(path).json()["error"]["message"]
            assert message == f"Unknown URL. Did you mean {similar}? GET /openapi.json lists the URLs of this server."
        assert "Did you mean" not in client.get("/page/pages.js").json()["error"]["message"]


def test_other_routes_of_openai_name_the_next_step(scripted):
    server = scripted("Fine.").server
    with server.openai() as client, client.with_options(base_url=server.url) as without_version:
        calls = {
            "base URL of a client must end with /v1": lambda: without_version.chat.completions.create(
                model="tiny", messages=HELLO
            ),
            "Files are not stored": lambda: client.files.retrieve("file-1"),
            "Files are not stored. ": lambda: client.files.create(file=b"Hello", purpose="user_data"),
            "do not support audio": lambda: client.audio.transcriptions.create(model="tiny", file=b"Hello"),
            "to /v1/messages at the same time": lambda: client.post("/messages/batches", cast_to=object),
        }
        for message, call in calls.items():
            with pytest.raises(openai.NotFoundError, match=message):
                call()
    with server.http() as client:
        assert "no other routes of Ollama's API" in client.get("/api/me").json()["error"]


def chunk(text):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return ChatCompletionChunk(id="1", created=1, model="tiny", object="chat.completion.chunk", choices=[choice])


class FailingEngine(ChatEngine):
    """An engine that raises an unexpected error after `chunks` chunks."""

    def __init__(self, chunks):
        self.chunks = chunks

    def status(self):
        return EngineStatus(state="ready", model="buggy")

    async def achat(self, request):
        await asyncio.sleep(0)
        raise ValueError(SECRET)

    async def astream(self, request):
        for _ in range(self.chunks):
            yield chunk("word ")
        raise ValueError(SECRET)


@pytest.mark.parametrize("stream", [False, True])
def test_unexpected_error_returns_500_without_details(stream, caplog):
    with serving(FailingEngine(0)) as server, server.http() as client:
        responses = [client.post("/v1/chat/completions", json={"messages": HELLO, "stream": stream}) for _ in range(3)]
    assert [response.status_code for response in responses] == [500, 500, 500]
    assert responses[0].json()["error"]["message"] == INTERNAL_ERROR
    assert SECRET not in responses[0].text
    assert SECRET in caplog.text


def test_error_in_a_stream_is_sent_as_the_last_event(caplog):
    with serving(FailingEngine(2)) as server, server.http() as client:
        response = client.post("/v1/chat/completions", json={"messages": HELLO, "stream": True})
    *_, last, end = response.text.split("\n\n")
    assert response.status_code == 200
    assert end == ""
    assert json.loads(last.removeprefix("data: ")) == error_body(ValueError())
    assert SECRET in caplog.text


def test_openai_client_raises_an_error_in_a_stream(scripted):
    served = scripted("A long answer that goes on and on. " * 50, delay=0.05)
    with served.server.openai() as client:
        stream = client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        next(stream)
        served.engine.close()
        with pytest.raises(openai.APIError) as caught:
            list(stream)
    assert caught.value.code == "engine_closed"


def test_closed_engine_returns_503(scripted):
    served = scripted("Fine.")
    served.engine.close()
    with served.server.openai() as client, pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO)
    assert caught.value.status_code == 503
    assert caught.value.code == "engine_closed"
