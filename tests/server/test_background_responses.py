"""Responses of the Responses API that are created in the background: polls, events that are read later, and limits."""

from __future__ import annotations

import asyncio
import json
import socket
import threading

import httpx
import openai
import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.errors import QueueFull
from dashinfer_vlm_core.protocol.responses import ResponsesRequest
from dashinfer_vlm_core.testing import EVERYTHING, Script, scripted_engine, scripted_registry
from dashinfer_vlm_server.api_keys import ApiKeys, KeyLimits
from dashinfer_vlm_server.endpoints.responses.background import BackgroundResponse, BackgroundResponses
from dashinfer_vlm_server.endpoints.responses.creation import Conversations, Creation
from dashinfer_vlm_server.endpoints.responses.response_store import ResponseStore
from dashinfer_vlm_server.errors import ApiError
from dashinfer_vlm_server.request_context import SLICE_BYTES
from dashinfer_vlm_server.sse import Discarded
from tests.clock import ManualClock
from tests.server.conftest import serving
from tests.server.test_responses import CALL, RESPONSE, TOOL, comparable, create, post
from tests.server.test_serve import StoppableServer
from tests.waiting import HANG, NEVER, until

LONG = RESPONSE * 50
ENDED = {"completed", "incomplete", "failed", "cancelled"}


def poll(client, response_id):
    until(lambda: client.responses.retrieve(response_id).status in ENDED)
    return client.responses.retrieve(response_id)


def start(client, **fields):
    return client.responses.create(model="tiny", input="Hello", background=True, **fields)


def events_of(client, response_id, after=None):
    options = {} if after is None else {"starting_after": after}
    return [event.to_dict() for event in client.responses.retrieve(response_id, stream=True, **options)]


def test_response_is_queued_and_then_equals_the_plain_one(scripted):
    served = scripted(f"I look.\n{CALL}")
    plain = create(served, tools=[TOOL])
    with served.server.openai() as client:
        queued = start(client, tools=[TOOL])
        final = poll(client, queued.id)
    assert (queued.status, queued.background, queued.output, queued.usage) == ("queued", True, [], None)
    assert (queued.model, queued.created_at) == (final.model, final.created_at)
    assert comparable(final) == comparable(plain) | {"background": True}
    first, second = (request.token_ids.tolist() for request in served.script.requests)
    assert first == second


def test_response_in_progress_has_its_complete_items(scripted):
    served = scripted(f"I look.\n{CALL}\n{LONG}", delay=0.01)
    with served.server.openai() as client:
        queued = start(client, tools=[TOOL], extra_body={"store": True})
        until(lambda: client.responses.retrieve(queued.id).output)
        assert client.responses.retrieve(queued.id).status == "in_progress"
        assert client.responses.retrieve(queued.id).output_text == "I look."
        for fields in ({"previous_response_id": queued.id}, {"input": [{"id": queued.id}]}):
            with pytest.raises(openai.APIStatusError):
                client.responses.create(model="tiny", **({"input": "?"} | fields))
        items = client.responses.input_items.list(queued.id).data
        client.responses.cancel(queued.id)
        assert client.responses.input_items.list(queued.id).data == items


def test_resuming_after_each_event_gives_the_rest(scripted):
    served = scripted(f"I look.\n{CALL}")
    with served.server.openai() as client:
        events = [event.to_dict() for event in start(client, tools=[TOOL], stream=True)]
        response_id = events[0]["response"]["id"]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["type"] for event in events[:3]] == [
            "response.created", "response.queued", "response.in_progress"
        ]  # fmt: skip
        assert events[-1]["type"] == "response.completed"
        assert events_of(client, response_id) == events
        for after in range(len(events)):
            assert events_of(client, response_id, after) == events[after + 1 :]
        assert client.responses.retrieve(response_id).to_dict() == events[-1]["response"]
        with pytest.raises(openai.BadRequestError, match=f"the sequence number {len(events) - 1}") as caught:
            events_of(client, response_id, len(events))
        assert caught.value.param == "starting_after"


def test_disconnect_does_not_end_it_and_a_reader_follows_it(scripted):
    served = scripted(LONG, delay=0.01)
    with served.server.openai() as client:
        with start(client, stream=True) as events:
            first = next(iter(events))
        response_id = first.response.id
        with client.responses.retrieve(response_id, stream=True, starting_after=2) as rest:
            following = next(iter(rest))
            assert served.script.running == 1
            served.script.delay = 0.0
            numbers = [following.sequence_number, *(event.sequence_number for event in rest)]
        assert numbers == list(range(3, len(events_of(client, response_id))))
        assert client.responses.retrieve(response_id).output_text == LONG.strip()


def test_cancel_ends_it_and_keeps_what_it_has(scripted):
    served = scripted(f"{CALL}\n{LONG}", delay=0.01)
    with served.server.openai() as client, start(client, stream=True, tools=[TOOL]) as events:
        response_id = next(iter(events)).response.id
        assert any(event.type == "response.output_text.delta" for event in events)
        served.script.delay = NEVER  # nothing but the cancellation ends it
        canceled = client.responses.cancel(response_id)
        until(lambda: served.script.running == 0)  # the engine cancels it on its own event loop, a moment later
        assert (canceled.status, canceled.error) == ("cancelled", None)
        assert [item.status for item in canceled.output] == ["completed", "incomplete"]
        last = list(events)[-1]
        assert (last.type, last.response.to_dict()) == ("response.incomplete", canceled.to_dict())
        assert events_of(client, response_id)[-1] == last.to_dict()
        assert client.responses.cancel(response_id).to_dict() == canceled.to_dict()
        assert client.responses.retrieve(response_id).to_dict() == canceled.to_dict()
        with pytest.raises(openai.BadRequestError, match="was canceled") as caught:
            client.responses.create(model="tiny", input="?", previous_response_id=response_id)
        assert caught.value.param == "previous_response_id"


def test_completed_response_is_continued_and_cancel_returns_it(scripted):
    served = scripted(RESPONSE)
    with served.server.openai() as client:
        first = poll(client, start(client).id)
        assert client.responses.cancel(first.id).to_dict() == first.to_dict()
        second = poll(client, start(client, previous_response_id=first.id).id)
        assert second.usage.input_tokens > first.usage.total_tokens
        limited = poll(client, start(client, max_output_tokens=3).id)
    assert (limited.status, limited.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize(
    ("error", "code"), [(QueueFull("Busy."), "rate_limit_exceeded"), (RuntimeError("secret"), "server_error")]
)
def test_failure_is_the_state_of_the_response(scripted, error, code):
    served = scripted(error)
    with served.server.openai() as client, served.server.http() as http:
        failed = poll(client, start(client).id)
        text = http.get(f"/v1/responses/{failed.id}", params={"stream": True}).text
    *_, reported, last = (json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {"))
    assert (failed.status, failed.error.code) == ("failed", code)
    assert "secret" not in text
    assert (reported["type"], last["type"], last["response"]) == ("error", "response.failed", failed.to_dict())


def test_invalid_request_is_rejected_at_once(scripted):
    served = scripted(RESPONSE)
    for fields, param in (({"temperature": 9}, "temperature"), ({"previous_response_id": "x"}, "previous_response_id")):
        response = post(served, input="Hello", background=True, **fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    with served.server.http() as client:
        created = client.post("/v1/responses", json={"input": "Hello"}).json()["id"]
        for query, param in (("stream=true", "stream"), ("starting_after=1", "starting_after")):
            response = client.get(f"/v1/responses/{created}?{query}")
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        for value in ("-1", "x"):
            response = client.get(f"/v1/responses/{created}?stream=true&starting_after={value}")
            assert (response.status_code, response.json()["error"]["param"]) == (400, "starting_after")


def test_request_that_cannot_be_served_is_rejected_at_once(scripted):
    served = scripted(RESPONSE)
    responses = [post(served, input="Hello", background=True, model="other")]
    served.engine.close()
    responses.append(post(served, input="Hello", background=True))
    codes = [(response.status_code, response.json()["error"]["code"]) for response in responses]
    assert codes == [(404, "model_not_found"), (503, "engine_closed")]


@pytest.mark.parametrize("field", ["instructions", "tools"])
def test_text_that_cannot_fit_is_rejected_before_it_is_repeated(scripted, field):
    served = scripted(RESPONSE)
    text = "x" * 100_000
    values = {"instructions": text, "tools": [{"type": "function", "name": "f", "description": text}]}
    response = post(served, input="Hello", background=True, **{field: values[field]})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert post(served, input="Hello", background=True, instructions=text[:9000]).json()["status"] == "queued"


def test_disconnect_while_it_is_queued_removes_it(scripted, paused_add):
    served = scripted(RESPONSE, settings={"max_background_responses": 1})
    with socket.create_connection(("127.0.0.1", served.server.port)) as connection:
        body = json.dumps({"input": "Hello", "background": True})
        head = f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
        assert paused_add.entered.wait(HANG)
    until(lambda: served.server.tasks == 0)
    paused_add.resume.set()
    assert paused_add.added.wait(HANG)
    until(lambda: paused_add.store.num_responses == 0)
    with served.server.openai() as client:
        with pytest.raises(openai.NotFoundError):
            client.responses.cancel(paused_add.response_id)
        assert poll(client, start(client).id).status == "completed"


async def queued(engine, store, **fields):
    request = ResponsesRequest.parse({"input": "Hello", "background": True, **fields})
    creation = Creation(Conversations(engine=engine, store=store), request)
    await creation.prepare()
    response = BackgroundResponse(creation, store, "")
    await response.queue()
    return response


def test_cancel_while_the_final_state_is_saved_has_no_effect(tiny_checkpoint, monkeypatch):
    saving = threading.Event()
    resume = threading.Event()
    update = ResponseStore.update

    def paused(*args):
        saving.set()
        assert resume.wait(HANG)
        return update(*args)

    async def cancel(engine):
        store = ResponseStore(max_responses=1, max_bytes=10**6)
        response = await queued(engine, store)
        running = asyncio.create_task(response.run(timeout=None))
        assert await asyncio.to_thread(saving.wait, HANG)
        canceling = asyncio.create_task(response.cancel())
        await asyncio.sleep(0)  # until it waits for the end
        resume.set()
        await asyncio.gather(running, canceling)
        events = b"".join([part async for part in response.read(-1)]).decode()
        return json.loads(store.get("", response.id).body), events

    monkeypatch.setattr(ResponseStore, "update", paused)
    with scripted_engine(RESPONSE, model=str(tiny_checkpoint)) as engine:
        body, events = asyncio.run(cancel(engine))
    assert (body["status"], body["output"][0]["content"][0]["text"]) == ("completed", RESPONSE)
    assert [name in events for name in ("response.completed", "response.incomplete")] == [True, False]


def test_response_that_ends_before_its_request_is_returned(scripted, monkeypatch):
    start_response = BackgroundResponses.start

    async def ended(*args):
        response = await start_response(*args)
        await response.cancel()
        return response

    monkeypatch.setattr(BackgroundResponses, "start", ended)
    response = post(scripted(RESPONSE), input="Hello", background=True)
    assert (response.status_code, response.json()["status"]) == (200, "cancelled")


def test_events_are_read_in_parts_until_they_are_discarded(tiny_checkpoint):
    async def read(engine):
        store = ResponseStore(max_responses=1, max_bytes=10**6)
        response = await queued(engine, store, instructions="é" * 100_000)
        events = response.read(-1)
        parts = [await anext(events)]
        while b"".join(parts).count(b"\n\n") < 2:
            parts.append(await anext(events))
        unread = response.read(-1)
        await anext(unread)
        store.delete("", response.id)
        with pytest.raises(ApiError, match="not found"):
            await anext(events)
        with pytest.raises(Discarded):  # within an event
            await anext(unread)
        return parts

    with scripted_engine(RESPONSE, model=str(tiny_checkpoint)) as engine:
        parts = asyncio.run(read(engine))
    assert max(map(len, parts)) == SLICE_BYTES
    lines = b"".join(parts).decode().splitlines()
    numbers = [json.loads(line[6:])["sequence_number"] for line in lines if line.startswith("data: ")]
    assert numbers == [0, 1]


def test_deleting_it_ends_it_and_its_readers(scripted):
    served = scripted(LONG, delay=NEVER)
    with served.server.openai() as client, start(client, stream=True) as events:
        response_id = next(iter(events)).response.id
        until(lambda: served.script.running == 1)
        client.responses.delete(response_id)
        until(lambda: served.script.running == 0)
        with pytest.raises(openai.APIError) as caught:
            list(events)
        assert caught.value.code == "response_not_found"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response_id)


def test_timeout_applies(scripted):
    served = scripted(LONG, delay=60, settings={"request_timeout": 600})
    with served.server.openai() as client:
        response = start(client)
        until(lambda: served.script.running == 1)
        served.server.loop.skip(600)
        failed = poll(client, response.id)
    assert (failed.status, served.script.running) == ("failed", 0)


# Limits


def test_responses_of_a_client_are_limited(scripted):
    served = scripted(LONG, delay=0.01, settings={"max_background_responses": 2})
    with served.server.openai() as client:
        running = [start(client).id for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="can have 2 responses") as caught:
            start(client)
        assert caught.value.code == "rate_limit_exceeded"
        assert int(caught.value.response.headers["retry-after"]) > 0
        client.responses.cancel(running[0])
        running[0] = start(client).id
        for response_id in running:
            client.responses.cancel(response_id)


def test_it_needs_stored_responses(scripted):
    response = post(scripted(RESPONSE, settings={"max_stored_responses": 0}), input="Hello", background=True)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "background")


def test_it_counts_for_the_limits_of_the_key(scripted):
    keys = ApiKeys(["sk-one", "sk-two"], limits=KeyLimits(max_requests=1, tokens_per_minute=10**6))
    served = scripted(LONG, delay=0.01, settings={"keys": keys, "clock": ManualClock()})
    with served.server.http() as client:
        body = {"input": "Hello", "background": True}
        one, two = ({"Authorization": f"Bearer sk-{name}"} for name in ("one", "two"))
        path = f"/v1/responses/{client.post('/v1/responses', json=body, headers=one).json()['id']}"
        rejected = client.post("/v1/responses", json={"input": "Hello"}, headers=one)
        assert rejected.status_code == 429
        until(lambda: served.script.running == 1)
        for method, suffix in (("GET", ""), ("GET", "?stream=true"), ("POST", "/cancel"), ("DELETE", "")):
            assert client.request(method, f"{path}{suffix}", headers=two).status_code == 404
        assert client.post(f"{path}/cancel", headers=one).json()["status"] == "cancelled"
        served.script.delay = 0.0
        used = client.post("/v1/responses", json={"input": "Hello"}, headers=one)
        assert used.status_code == 200
    assert int(used.headers["x-ratelimit-remaining-tokens"]) < 10**6 - used.json()["usage"]["total_tokens"]


def test_events_count_for_the_memory_of_the_store(scripted):
    served = scripted(RESPONSE, LONG * 20, settings={"max_stored_bytes": 100_000}, delay=0.0)
    with served.server.openai() as client:
        earlier = create(served).id
        response = start(client)
        until(lambda: not is_stored(client, response.id))
        assert not is_stored(client, earlier)
        until(lambda: served.script.running == 0)
        huge = [{"role": "user", "content": "x" * 200_000}]
        with pytest.raises(openai.BadRequestError, match="more memory"):
            client.responses.create(model="tiny", input=huge, background=True)


def is_stored(client, response_id):
    try:
        return bool(client.responses.retrieve(response_id))
    except openai.NotFoundError:
        return False


def test_closing_the_engine_makes_it_fail(scripted):
    served = scripted(LONG, delay=0.01)
    with served.server.http() as client:
        response_id = client.post("/v1/responses", json={"input": "Hello", "background": True}).json()["id"]
        with client.stream("GET", f"/v1/responses/{response_id}?stream=true") as response:
            lines = response.iter_lines()
            assert any(line == "event: response.output_text.delta" for line in lines)
            served.engine.close()
            *_, error, failed = (json.loads(line[6:]) for line in lines if line.startswith("data: {"))
        assert (error["code"], failed["response"]["status"]) == ("engine_closed", "failed")
        assert client.get(f"/v1/responses/{response_id}").json() == failed["response"]


@pytest.mark.parametrize(("grace", "status"), [(0.0, "failed"), (NEVER, "completed")])
def test_shutdown_waits_for_it_and_then_makes_it_fail(tiny_checkpoint, grace, status):
    script = Script(LONG, delay=0.01)
    config = EngineConfig(model=str(tiny_checkpoint), decoder="scripted")
    with Engine(config, registry=scripted_registry(script)) as engine:
        stoppable = StoppableServer.start(engine, grace=grace)
        with httpx.Client(base_url=f"http://127.0.0.1:{stoppable.port}", trust_env=False, timeout=HANG) as client:
            path = "/v1/responses"
            response_id = client.post(path, json={"input": "Hello", "background": True}).json()["id"]
            with client.stream("GET", f"{path}/{response_id}?stream=true") as response:
                lines = response.iter_lines()
                assert any(line == "event: response.output_text.delta" for line in lines)
                stoppable.stop()
                script.delay = 0.0 if status == "completed" else 60.0
                *_, last = (json.loads(line[6:]) for line in lines if line.startswith("data: {"))
        stoppable.assert_ends()
    assert last["type"] == f"response.{status}"


def test_shutdown_waits_without_a_reader(tiny_checkpoint):
    script = Script(LONG, delay=60)
    config = EngineConfig(model=str(tiny_checkpoint), decoder="scripted")
    with Engine(config, registry=scripted_registry(script)) as engine:
        stoppable = StoppableServer.start(engine, grace=NEVER)
        with httpx.Client(base_url=f"http://127.0.0.1:{stoppable.port}", trust_env=False, timeout=HANG) as client:
            created = client.post("/v1/responses", json={"input": "Hello", "background": True}).json()
            stoppable.stop()
            until(lambda: client.get("/health").json()["status"] == "draining")
            assert client.post("/v1/responses", json={"input": "Hello"}).status_code == 503
            path = f"/v1/responses/{created['id']}"
            assert client.get(path).json()["status"] in {"queued", "in_progress"}
            assert client.post(f"{path}/cancel").json()["status"] == "cancelled"
        stoppable.assert_ends()


def test_twenty_calls_in_a_row():
    script = Script(*[CALL] * 20, "Sunny.", supported_params=EVERYTHING)
    config = EngineConfig(decoder="scripted")  # the context of the bundled model is long enough
    fields = {"model": "demo", "tools": [TOOL], "background": True}
    given, previous = "?", None
    with Engine(config, registry=scripted_registry(script)) as engine, serving(engine) as server:
        client = server.openai()
        for _ in range(20):
            response = client.responses.create(input=given, previous_response_id=previous, **fields)
            (call,) = poll(client, response.id).output
            given = [{"type": "function_call_output", "call_id": call.call_id, "output": "Sun."}]
            previous = response.id
        last = client.responses.create(input=given, previous_response_id=previous, **fields)
        assert poll(client, last.id).output_text == "Sunny."
        client.close()
    lengths = [len(request.token_ids) for request in script.requests]
    assert lengths == sorted(set(lengths))
    assert len(lengths) == 21
