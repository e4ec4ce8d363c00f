"""The Responses API over WebSockets, with OpenAI's client and with bare sockets."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import socket
import struct

import openai
import pytest
from uvicorn.protocols.utils import ClientDisconnected
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.testing import EVERYTHING, Script, scripted_engine, scripted_registry
from dashinfer_vlm_server.api_keys import ApiKeys, KeyLimits
from dashinfer_vlm_server.endpoints.responses import websocket as websocket_module
from dashinfer_vlm_server.websocket_protocol import MAX_FRAMES, LimitedWebSocketProtocol
from tests.clock import ManualClock
from tests.samples import image_url
from tests.server.conftest import serving
from tests.server.test_responses import CALL, RESPONSE, TOOL, comparable, create
from tests.server.test_serve import StoppableServer
from tests.waiting import HANG, NEVER, until

LONG = RESPONSE * 50
TERMINAL = {"response.completed", "response.incomplete", "response.failed", "error"}


@contextlib.contextmanager
def connected(server, *, headers=None, **options):
    url = f"ws://127.0.0.1:{server.port}/v1/responses"
    limits = {"open_timeout": HANG, "close_timeout": 1, "proxy": None, "max_size": None}
    with connect(url, additional_headers=headers, **limits, **options) as websocket:
        yield websocket


def receive(websocket):
    return json.loads(websocket.recv(timeout=HANG))


def turn(websocket, given="Hello", **fields):
    """Create a response; return its events."""
    websocket.send(json.dumps({"type": "response.create", "input": given, **fields}))
    events = [receive(websocket)]
    while events[-1]["type"] not in TERMINAL:
        events.append(receive(websocket))
    return events


def final(websocket, given="Hello", **fields):
    return turn(websocket, given, **fields)[-1]["response"]


def error(websocket, given="Hello", **fields):
    (event,) = turn(websocket, given, **fields)
    assert event.keys() == {"type", "status", "error"}
    return event["status"], event["error"]["code"], event["error"]["param"]


@pytest.fixture(scope="module")
def server(tiny_checkpoint):
    engine = scripted_engine(RESPONSE, model=str(tiny_checkpoint), served_model_name="tiny", max_model_len=1024)
    with engine, serving(engine) as server:
        yield server


# Responses


def test_events_are_those_of_a_stream(scripted):
    served = scripted(f"I look.\n{CALL}")
    with served.server.openai() as client:
        fields = {"model": "tiny", "tools": [TOOL], "temperature": 0.5}
        streamed = [event.to_dict() for event in client.responses.create(input="Hello", stream=True, **fields)]
        with client.responses.connect() as connection:
            events = []
            connection.response.create(input="Hello", **fields)
            for event in connection:
                events.append(event)
                if event.type in TERMINAL:
                    break
    assert [event.type for event in events] == [event["type"] for event in streamed]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert comparable(events[-1].response) == comparable(create(served, tools=[TOOL], temperature=0.5))
    tokens = [request.token_ids.tolist() for request in served.script.requests]
    assert tokens[0] == tokens[1]
    assert served.script.requests[0].sampling == served.script.requests[1].sampling


def test_responses_follow_each_other_with_images(server):
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": image_url()}]}]
    with connected(server) as websocket:
        first, second = final(websocket), final(websocket, image)
        websocket.send(json.dumps({"type": "response.create", "input": "One"}))
        third = turn(websocket, "Two")[-1]["response"]
        fourth = turn_events(websocket)[-1]["response"]
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    assert {third["status"], fourth["status"]} == {"completed"}
    assert third["id"] != fourth["id"]


def turn_events(websocket):
    events = [receive(websocket)]
    while events[-1]["type"] not in TERMINAL:
        events.append(receive(websocket))
    return events


def test_stored_responses_are_shared_with_requests(server):
    with connected(server) as websocket, server.openai() as client:
        first = final(websocket)
        assert client.responses.retrieve(first["id"]).output_text == RESPONSE
        second = client.responses.create(model="tiny", input="And?", previous_response_id=first["id"])
        third = final(websocket, "Why?", previous_response_id=second.id)
    assert third["usage"]["input_tokens"] > second.usage.total_tokens


def test_response_that_is_not_stored_is_continued_by_its_connection_alone(server):
    with connected(server) as websocket, connected(server) as other, server.openai() as client:
        first = final(websocket, store=False)
        assert first["store"] is False
        item = first["output"][0]["id"]
        not_found = (400, "previous_response_not_found", "previous_response_id")
        assert error(other, "And?", previous_response_id=first["id"]) == not_found
        assert error(other, [{"id": item}])[:2] == (404, "item_not_found")
        for request in (client.responses.retrieve, client.responses.cancel, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                request(first["id"])
        second = final(websocket, "And?", previous_response_id=first["id"], store=False)
        assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"]
        assert error(websocket, "Why?", previous_response_id=first["id"], store=False) == not_found
        third = final(websocket, "Why?", previous_response_id=second["id"], store=False)
        assert third["usage"]["input_tokens"] > second["usage"]["total_tokens"]
    with connected(server) as again:
        assert error(again, "?", previous_response_id=third["id"], store=False) == not_found


def test_failed_turn_evicts_what_it_continued(server):
    with connected(server) as websocket:
        first = final(websocket, store=False)["id"]
        assert error(websocket, "?", previous_response_id=first, temperature=9)[2] == "temperature"
        assert error(websocket, "?", previous_response_id=first)[1] == "previous_response_not_found"
        stored = final(websocket)["id"]
        assert error(websocket, "?", previous_response_id=stored, temperature=9)[2] == "temperature"
        assert final(websocket, "?", previous_response_id=stored)["status"] == "completed"


def test_state_of_a_connection_is_removed_with_it(scripted):
    served = scripted(RESPONSE, settings={"max_stored_responses": 1})
    kept = create(served).id
    with served.server.openai() as client:
        with connected(served.server) as websocket:
            final(websocket, store=False)
            assert not is_stored(client, kept)  # it counts for the limit
        kept = create(served).id
        assert is_stored(client, kept)


@pytest.mark.parametrize("store", [False, True])
def test_disconnect_while_a_response_is_stored_keeps_what_clients_can_use(scripted, paused_add, store):
    served = scripted(RESPONSE)
    with connected(served.server) as websocket:
        websocket.send(json.dumps({"type": "response.create", "input": "Hello", "store": store}))
        assert paused_add.entered.wait(HANG)
    until(lambda: served.server.tasks == 0)
    paused_add.resume.set()
    assert paused_add.added.wait(HANG)
    until(lambda: paused_add.store.num_responses == store)


def is_stored(client, response_id):
    try:
        return bool(client.responses.retrieve(response_id))
    except openai.NotFoundError:
        return False


def test_twenty_calls_in_a_row():
    script = Script(*[CALL] * 20, "Sunny.", supported_params=EVERYTHING)
    config = EngineConfig(decoder="scripted")  # the context of the bundled model is long enough
    with Engine(config, registry=scripted_registry(script)) as engine, serving(engine) as server:
        given, previous = "?", None
        with connected(server) as websocket:
            for _ in range(20):
                response = final(websocket, given, previous_response_id=previous, tools=[TOOL], store=False)
                (call,) = response["output"]
                given = [{"type": "function_call_output", "call_id": call["call_id"], "output": "Sun."}]
                previous = response["id"]
            last = final(websocket, given, previous_response_id=previous, tools=[TOOL], store=False)
    assert last["output"][0]["content"][0]["text"] == "Sunny."
    lengths = [len(request.token_ids) for request in script.requests]
    assert lengths == sorted(set(lengths))


# Errors


BAD = {
    "not JSON": ("{", None),
    "not an object": ("[]", None),
    "not UTF-8": (b'{"type": "\xff"}', None),
    "no type": ({"input": "Hello"}, "type"),
    "unknown type": ({"type": "response.cancel"}, "type"),
    "background": ({"type": "response.create", "input": "?", "background": True}, "background"),
    "stream": ({"type": "response.create", "input": "?", "stream": False}, "stream"),
    "warm-up": ({"type": "response.create", "input": "?", "generate": False}, "generate"),
    "stream_id": ({"type": "response.create", "input": "?", "stream_id": "a"}, "stream_id"),
    "no input": ({"type": "response.create"}, "input"),
    "damaged image": (
        {
            "type": "response.create",
            "input": [
                {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}
            ],
        },
        "input[0].content[0]",
    ),
}


def test_bad_messages_are_errors_and_the_connection_stays_open(server, caplog):
    with connected(server) as websocket:
        for name, (message, param) in BAD.items():
            websocket.send(json.dumps(message) if isinstance(message, dict) else message)
            event = receive(websocket)
            assert (name, event["type"], event["status"], event["error"]["param"]) == (name, "error", 400, param)
        assert final(websocket, stream=True, background=False, stream_options=None)["status"] == "completed"
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"type": "session.update", "session": {"instructions": "Be brief."}}, "type"),
        ({"type": "response.create", "response": {"input": "Hello"}}, "response"),
    ],
)
def test_message_of_the_realtime_api_is_an_error_with_the_form(server, message, param):
    with connected(server) as websocket:
        websocket.send(json.dumps(message))
        error = receive(websocket)["error"]
    assert error["param"] == param
    assert '{"type": "response.create", "input": "..."}' in error["message"]


def test_error_after_the_first_event_is_a_failed_response(scripted):
    served = scripted(LONG, delay=0.01)
    with connected(served.server) as websocket:
        websocket.send(json.dumps({"type": "response.create", "input": "Hello"}))
        until(lambda: receive(websocket)["type"] == "response.output_text.delta")
        served.engine.close()
        *_, last = turn_events(websocket)
        assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "server_error")
        assert error(websocket)[:2] == (503, "engine_closed")


def test_disconnect_cancels_the_response(scripted):
    served = scripted(LONG, delay=0.01)
    with connected(served.server) as websocket:
        websocket.send(json.dumps({"type": "response.create", "input": "Hello"}))
        receive(websocket)
        served.script.delay = NEVER
        assert served.script.running == 1
    until(lambda: served.script.running == 0)
    served.script.delay = 0.01
    with connected(served.server) as websocket:
        websocket.send(json.dumps({"type": "response.create", "input": "Hello"}))
        receive(websocket)
        served.script.delay = NEVER
        websocket.socket.shutdown(socket.SHUT_RDWR)
        until(lambda: served.script.running == 0)


# Access


def refused(server, **options):
    with pytest.raises(InvalidStatus) as caught, connected(server, **options):
        pass
    return caught.value.response.status_code, json.loads(caught.value.response.body)["error"]["code"]


def test_security_43_foreign_pages_and_hosts_are_rejected(server):
    assert refused(server, origin="https://evil.example") == (403, "origin_not_allowed")
    own = f"http://127.0.0.1:{server.port}"
    with connected(server, origin=own) as websocket:
        assert final(websocket)["status"] == "completed"
    status, body = handshake(server, host="evil.example")
    assert status == 403
    assert b"host_not_allowed" in body


def test_security_43_keys_are_required_and_share_nothing(scripted):
    keys = ApiKeys(["sk-one", "sk-two"])
    served = scripted(RESPONSE, settings={"keys": keys})
    one, two = ({"Authorization": f"Bearer sk-{name}"} for name in ("one", "two"))
    for headers in (None, {"Authorization": "Bearer sk-three"}):
        assert refused(served.server, headers=headers) == (401, "invalid_api_key")
    with connected(served.server, headers=one) as first, connected(served.server, headers=two) as second:
        for store in (True, False):
            response = final(first, store=store)["id"]
            assert error(second, "?", previous_response_id=response)[1] == "previous_response_not_found"
            assert final(first, "?", previous_response_id=response)["status"] == "completed"


def test_limits_of_a_key_apply_to_messages(scripted):
    keys = ApiKeys(["sk-one"], limits=KeyLimits(max_requests=1, tokens_per_minute=60))
    clock = ManualClock()
    served = scripted(RESPONSE, settings={"keys": keys, "clock": clock})
    with connected(served.server, headers={"Authorization": "Bearer sk-one"}) as websocket:
        assert final(websocket)["status"] == "completed"
        assert error(websocket)[:2] == (429, "rate_limit_exceeded")
        clock.advance(600)
        assert final(websocket)["status"] == "completed"


def test_removed_key_ends_its_connection(scripted, tmp_path):
    file, clock = tmp_path / "keys", ManualClock()
    file.write_text("sk-old\nsk-kept\n")
    served = scripted(RESPONSE, settings={"keys": ApiKeys([], file), "clock": clock})
    with connected(served.server, headers={"Authorization": "Bearer sk-old"}) as websocket:
        assert final(websocket)["status"] == "completed"
        file.write_text("sk-kept\n")
        clock.advance(1)
        assert error(websocket)[:2] == (401, "invalid_api_key")
        with pytest.raises(ConnectionClosed):
            websocket.recv(timeout=HANG)


def test_other_urls_have_no_websocket(server, caplog):
    for path in ("/v1/chat/completions", "/", "/nothing"):
        with pytest.raises(InvalidStatus) as caught, connect(f"ws://127.0.0.1:{server.port}{path}", proxy=None):
            pass
        assert caught.value.response.status_code == 404
        assert b"websocket_not_supported" in caught.value.response.body
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_disabled_protocol_has_no_websocket(scripted):
    served = scripted(RESPONSE, settings={"protocols": ("openai",)})
    assert refused(served.server) == (404, "websocket_not_supported")


def test_security_43_connections_are_limited(scripted, monkeypatch):
    monkeypatch.setattr(websocket_module, "MAX_CONNECTIONS_PER_CLIENT", 1)
    served = scripted(RESPONSE)
    with connected(served.server):
        assert refused(served.server) == (429, "rate_limit_exceeded")
    until(lambda: served.server.connections == 0)
    with connected(served.server) as websocket:
        assert final(websocket)["status"] == "completed"


def test_connection_ends_after_an_hour(scripted, monkeypatch):
    assert websocket_module.CONNECTION_SECONDS == 3600
    monkeypatch.setattr(websocket_module, "CONNECTION_SECONDS", 10.0)  # shorter than the time between two pings
    served = scripted(RESPONSE)
    with connected(served.server) as websocket:
        assert final(websocket)["status"] == "completed"
        served.server.loop.skip(10)
        assert receive(websocket)["error"]["code"] == "websocket_connection_limit_reached"
        with pytest.raises(ConnectionClosed) as caught:
            websocket.recv(timeout=HANG)
    assert caught.value.rcvd.code == 1001


def test_shutdown_closes_idle_connections(tiny_checkpoint):
    config = EngineConfig(model=str(tiny_checkpoint), decoder="scripted")
    with Engine(config, registry=scripted_registry(Script(RESPONSE))) as engine:
        stoppable = StoppableServer.start(engine, grace=HANG)
        with connected(stoppable) as websocket:
            assert final(websocket)["status"] == "completed"
            stoppable.stop()
            assert receive(websocket)["error"]["code"] == "draining"
            with pytest.raises(ConnectionClosed) as caught:
                websocket.recv(timeout=HANG)
            assert caught.value.rcvd.code == 1001
        stoppable.assert_ends()


# Frames of malicious clients

TEXT, CONTINUATION, CLOSE, PING, FIN = 0x1, 0x0, 0x8, 0x9, 0x80


def handshake(server, *, host="localhost", method="GET", extra=""):
    """Return the status and the rest of what the server sends."""
    with bare(server, host=host, method=method, extra=extra) as connection:
        connection.shutdown(socket.SHUT_WR)
        data = b"".join(iter(lambda: connection.recv(65536), b""))
    return int(data.split()[1]), data


@contextlib.contextmanager
def bare(server, *, host="localhost", method="GET", extra=""):
    key = base64.b64encode(os.urandom(16)).decode()
    head = (
        f"{method} /v1/responses HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n{extra}\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG) as connection:
        connection.sendall(head.encode())
        yield connection


@contextlib.contextmanager
def opened(server):
    with bare(server) as connection:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += connection.recv(1)
        assert head.startswith(b"HTTP/1.1 101 ")
        yield connection


def frame(opcode, data=b"", *, fin=True, length=None, masked=True):
    size = len(data) if length is None else length
    flag = 0x80 if masked else 0
    short = bytes([flag | size]) if size < 126 else bytes([flag | 127]) + struct.pack("!Q", size)
    return bytes([opcode | (FIN if fin else 0)]) + short + (b"\x00" * 4 if masked else b"") + data


def close_code(connection):
    """Return the code of the server's close frame, after its other frames."""
    with connection.makefile("rb") as received:
        while head := received.read(2):
            size = head[1] if head[1] < 126 else int.from_bytes(received.read(2 if head[1] == 126 else 8), "big")
            data = received.read(size)
            if head[0] & 0xF == CLOSE:
                return int.from_bytes(data[:2], "big")
    return None


ATTACKS = {
    "frame of 1 GiB": ([frame(TEXT, b"{", length=2**30)], 1009),
    "fragments of 17 MiB": (
        [frame(TEXT, b"x" * 2**20, fin=False), *[frame(CONTINUATION, b"x" * 2**20, fin=False)] * 16], 1009
    ),
    "100,000 empty frames": (
        [frame(TEXT, fin=False), frame(CONTINUATION, fin=False) * 100_000], 1009
    ),
    "many messages": ([frame(TEXT, b"{}") * 10_000], 1008),
    "no mask": ([frame(TEXT, b"{}", masked=False)], 1002),
    "reserved bit": ([bytes([0xF1, 0x80]) + b"\x00" * 4], 1002),
    "unknown opcode": ([frame(0x3, b"{}")], 1002),
    "long ping": ([frame(PING, b"x" * 200)], 1002),
    "continuation without a beginning": ([frame(CONTINUATION, b"{}")], 1002),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_security_43_bad_frames_close_the_connection(server, name, caplog):
    frames, code = ATTACKS[name]
    with opened(server) as connection:
        for data in frames:
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
        with contextlib.suppress(ConnectionError):
            assert close_code(connection) == code
    with connected(server) as websocket:
        assert final(websocket)["status"] == "completed"
    assert "Traceback" not in caplog.text
    assert MAX_FRAMES < 100_000


def test_event_after_the_server_closed_the_connection_is_a_disconnect(server):
    async def fail_and_send(protocol):
        protocol._fail(1008, "")
        await protocol.send({"type": "websocket.send", "text": "{}"})

    with opened(server):
        (protocol,) = (each for each in server.protocols if isinstance(each, LimitedWebSocketProtocol))
        sending = asyncio.run_coroutine_threadsafe(fail_and_send(protocol), server.loop)
        with pytest.raises(ClientDisconnected):
            sending.result(HANG)


def test_bad_handshakes_are_rejected(server, caplog):
    for extra in ("Sec-WebSocket-Key: x\r\n", "".join(f"X-{index}: 1\r\n" for index in range(200))):
        assert handshake(server, extra=extra)[0] == 400
    assert handshake(server, method="DELETE")[0] == 405
    assert "Traceback" not in caplog.text


def test_security_43_client_that_does_not_read_is_disconnected(scripted):
    served = scripted(RESPONSE)
    with opened(served.server) as connection:
        pings = frame(PING, b"x" * 125) * 2000
        connection.setblocking(False)
        until(lambda: not send(connection, pings) and is_paused(served.server))  # the server does not read either
        served.server.loop.skip(LimitedWebSocketProtocol.write_seconds)
        until(lambda: served.server.connections == 0)


def send(connection, data):
    try:
        return connection.send(data)
    except BlockingIOError:
        return 0


def is_paused(server):
    return not any(connection.writable.is_set() for connection in server.protocols)


def test_security_43_one_message_waits_during_a_turn(scripted):
    served = scripted(LONG, delay=0.01)
    message = json.dumps({"type": "response.create", "input": "Hello"})
    with connected(served.server) as websocket:
        websocket.send(message)
        until(lambda: served.script.running == 1)
        (protocol,) = served.server.protocols
        websocket.send(message)
        until(lambda: protocol.read_paused and protocol.queue.empty())  # it was received, and nothing more is read
        websocket.send(message)
        for _ in range(4):
            served.server.loop.skip(20)  # without a response to the ping
        served.script.delay = 0.0
        assert [turn_events(websocket)[-1]["type"] for _ in range(3)] == ["response.completed"] * 3


LARGE = 900_000


def test_security_43_messages_count_for_the_memory_of_bodies(scripted):
    served = scripted(RESPONSE, settings={"max_buffered_bytes": 2 * LARGE + 100_000})
    part = frame(TEXT, b"x" * LARGE, fin=False)
    with opened(served.server) as first, opened(served.server) as second, opened(served.server) as third:
        for connection in (first, second):
            connection.sendall(part)
        until(lambda: received(served.server) == [0, LARGE, LARGE])
        with contextlib.suppress(ConnectionError):
            third.sendall(part)
        assert close_code(third) == 1013
        with served.server.http() as client:
            assert client.post("/v1/responses", content=b"x" * LARGE).status_code == 429
            until(lambda: client.post("/v1/responses", json={"input": "Hello"}).status_code == 200)
        first.sendall(frame(CONTINUATION))
        assert b'"invalid_json"' in first.recv(1000)
        until(lambda: received(served.server) == [0, LARGE])
        first.sendall(part)  # its earlier message needs no memory anymore
        until(lambda: received(served.server) == [LARGE, LARGE])


def received(server):
    """Return how many bytes of an incomplete message of each connection were read, and have memory."""
    sockets = [protocol for protocol in server.protocols if isinstance(protocol, LimitedWebSocketProtocol)]
    return sorted(sum(map(len, protocol.frames)) for protocol in sockets if not protocol._waits_for_memory)


def test_memory_of_messages_is_free_after_their_connections(scripted):
    served = scripted(RESPONSE, settings={"max_buffered_bytes": 2 * LARGE})
    for _ in range(5):
        with opened(served.server) as connection:
            connection.sendall(frame(TEXT, b"x" * LARGE, length=2 * LARGE))
            until(lambda: any(len(protocol.conn.reader.buffer) >= LARGE for protocol in served.server.protocols))
        until(lambda: served.server.connections == 0)
    with connected(served.server) as websocket:
        assert final(websocket, metadata={"a": "x" * 400})["status"] == "completed"
        assert error(websocket, "a " * (LARGE // 2 + 1000))[1] == "context_length_exceeded"


def test_security_43_message_after_the_end_of_its_connection_gets_no_memory(scripted, monkeypatch):
    monkeypatch.setattr(websocket_module, "CONNECTION_SECONDS", 10.0)  # shorter than the time between two pings
    served = scripted(RESPONSE, settings={"max_buffered_bytes": 2 * LARGE})
    for _ in range(2):
        with opened(served.server) as connection:
            served.server.loop.skip(10)
            assert close_code(connection) == 1001
            connection.sendall(frame(TEXT, b"x" * LARGE, fin=False))
            until(lambda: any(protocol._reservation for protocol in served.server.protocols))
            served.server.loop.skip(0)
        served.server.loop.skip(10)  # the time for the other end to close
        until(lambda: served.server.connections == 0)
    with connected(served.server) as websocket:
        assert error(websocket, "a " * (LARGE // 2 + 1000))[1] == "context_length_exceeded"


def test_security_43_slow_message_closes_the_connection(scripted, monkeypatch):
    monkeypatch.setattr(LimitedWebSocketProtocol, "message_seconds", 10.0)  # shorter than the time between two pings
    served = scripted(RESPONSE)
    with opened(served.server) as connection:
        connection.sendall(frame(TEXT, b'{"type":', length=1000))
        until(lambda: any(protocol.conn.reader.buffer for protocol in served.server.protocols))
        served.server.loop.skip(10)
        assert close_code(connection) == 1008


def test_lost_client_is_detected_by_pings(scripted):
    served = scripted(RESPONSE)
    with opened(served.server) as connection:
        for _ in range(4):
            served.server.loop.skip(10)  # without a response to the ping
        assert close_code(connection) == 1011
