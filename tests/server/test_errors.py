"""Errors on the wire: the right status, OpenAI's body, and nothing that was not meant for the caller."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from dashinfer_vlm_core import EngineStatus, errors
from dashinfer_vlm_server.errors import INTERNAL_ERROR, error_body, error_response, status_for
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
    needed = {"prompt_tokens": 9, "limit": 8} if kind is errors.ContextLengthExceeded else {}
    return kind("What is wrong.", **needed)


def family(kind):
    return {kind}.union(*(family(child) for child in kind.__subclasses__()))


def test_every_error_has_a_status():
    assert family(errors.DashInferVLMError) - {errors.DashInferVLMError} == STATUSES.keys()
    assert {kind: status_for(make(kind)) for kind in STATUSES} == STATUSES


@pytest.mark.parametrize("kind", STATUSES)
def test_the_type_fits_the_status(kind):
    error = error_body(make(kind))["error"]
    expected = {429: "rate_limit_error"}.get(
        STATUSES[kind], "server_error" if STATUSES[kind] >= 500 else "invalid_request_error"
    )
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == expected


def test_what_is_for_the_operator_is_not_shown_to_the_caller():
    assert error_body(errors.CheckpointError(SECRET))["error"]["message"] == INTERNAL_ERROR
    assert error_body(ValueError(SECRET))["error"]["message"] == INTERNAL_ERROR
    assert error_body(errors.MissingDependency("pip install x"))["error"]["message"] == "pip install x"


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (1.2, "2"), (30, "30")])
def test_a_full_queue_says_when_to_try_again(seconds, header):
    assert error_response(errors.QueueFull("Busy.", retry_after=seconds)).headers["retry-after"] == header


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", CLIENT_CLASSES)
def test_openais_client_raises_its_own_classes(scripted, kind, stream):
    server = scripted(make(kind), "Fine.").server
    with server.openai() as client:
        with pytest.raises(CLIENT_CLASSES[kind]) as caught:
            client.chat.completions.create(model="tiny", messages=HELLO, stream=stream)
        assert caught.value.status_code == STATUSES[kind]
        assert caught.value.code == error_body(make(kind))["error"]["code"]
        assert client.chat.completions.create(model="tiny", messages=HELLO).choices[0].message.content == "Fine."


def test_unknown_urls_and_methods_are_answered_as_openai_does(scripted):
    with scripted("Fine.").server.http() as client:
        missing = client.get("/v1/nothing")
        wrong = [client.get("/v1/chat/completions"), client.delete("/v1/models"), client.post("/health")]
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "unknown_url"
    assert "POST /v1/chat/completions" in missing.json()["error"]["message"]
    assert [reply.status_code for reply in wrong] == [405, 405, 405]
    allowed = [sorted(reply.headers["allow"].split(", ")) for reply in wrong]
    assert allowed == [["POST"], ["GET", "HEAD"], ["GET", "HEAD"]]
    assert wrong[1].json()["error"]["message"] == "This URL answers GET and HEAD only."
    assert wrong[0].json()["error"] == {
        "message": "This URL answers POST only.",
        "type": "invalid_request_error",
        "param": None,
        "code": "method_not_allowed",
    }


def chunk(text):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return ChatCompletionChunk(id="1", created=1, model="tiny", object="chat.completion.chunk", choices=[choice])


class Buggy:
    """An engine that breaks off with what nobody foresaw, after `pieces` pieces."""

    def __init__(self, pieces):
        self.pieces = pieces

    def status(self):
        return EngineStatus(state="ready", model="buggy")

    async def achat(self, request):
        await asyncio.sleep(0)
        raise ValueError(SECRET)

    async def astream(self, request):
        for _ in range(self.pieces):
            yield chunk("word ")
        raise ValueError(SECRET)


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_is_an_error_of_the_server_without_its_inner_life(stream, caplog):
    with serving(Buggy(0)) as server, server.http() as client:
        replies = [client.post("/v1/chat/completions", json={"messages": HELLO, "stream": stream}) for _ in range(3)]
    assert [reply.status_code for reply in replies] == [500, 500, 500]
    assert replies[0].json()["error"]["message"] == INTERNAL_ERROR
    assert SECRET not in replies[0].text
    assert SECRET in caplog.text


def test_an_error_after_the_head_ends_the_stream_with_an_error_and_without_done(caplog):
    with serving(Buggy(2)) as server, server.http() as client:
        reply = client.post("/v1/chat/completions", json={"messages": HELLO, "stream": True})
    *_, last, end = reply.text.split("\n\n")
    assert reply.status_code == 200
    assert end == ""
    assert json.loads(last.removeprefix("data: ")) == error_body(ValueError())
    assert SECRET in caplog.text


def test_openais_client_raises_what_comes_in_the_middle_of_a_stream(scripted):
    served = scripted("A long answer that goes on and on.", delay=0.05)
    with served.server.openai() as client:
        stream = client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        next(stream)
        served.engine.close()
        with pytest.raises(openai.APIError) as caught:
            list(stream)
    assert caught.value.code == "engine_closed"


def test_a_closed_engine_answers_503(scripted):
    served = scripted("Fine.")
    served.engine.close()
    with served.server.openai() as client, pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO)
    assert caught.value.status_code == 503
    assert caught.value.code == "engine_closed"
