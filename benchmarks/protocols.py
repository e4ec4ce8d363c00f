"""What each protocol costs the server per token, relative to Chat Completions.

    python -m benchmarks.protocols [--rounds 30] [--requests 5] [--tokens 600]

The decoder of `benchmarks/scripted_server.py` takes no time. Each protocol streams the same responses in alternating
rounds; a token's cost is the server's CPU time of long responses minus that of responses of one token. The last table
is a conversation of 20 tool calls, whose results the client sends at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from .client import READ_TIMEOUT
from .engines import Launch, Server, end_with_us
from .scripted_server import CALL_TOP_P, TEXT_TOKENS

QUESTION = "What is there to see?"
MESSAGES = [{"role": "user", "content": QUESTION}]
PARAMETERS = {"type": "object", "properties": {"color": {"type": "string"}}, "required": ["color"]}
TOOL = {"type": "function", "name": "count", "parameters": PARAMETERS}
CALLS = 20
CALL_TOKENS = 99
"""More than a call has."""
ERROR = re.compile(rb'"error": ?[{"]')
"""An error within a stream, which is an object, or a string in Ollama's format."""

Body = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """One of the server's protocols.

    Attributes:
        name: its name in the table.
        path: the path of its route, after the address of the server.
        body: number of tokens -> body of a streamed request.
        socket: whether the body is a message of a WebSocket.
    """

    name: str
    path: str
    body: Callable[[int], Body]
    socket: bool = False


def _response(tokens: int) -> Body:
    return {"input": QUESTION, "max_output_tokens": tokens, "store": False}


PROTOCOLS = (
    Protocol(
        name="Chat Completions",
        path="/v1/chat/completions",
        body=lambda tokens: {"messages": MESSAGES, "max_tokens": tokens, "stream": True},
    ),
    Protocol(
        name="Completions",
        path="/v1/completions",
        body=lambda tokens: {"prompt": QUESTION, "max_tokens": tokens, "stream": True},
    ),
    Protocol(name="Responses", path="/v1/responses", body=lambda tokens: {**_response(tokens), "stream": True}),
    Protocol(
        name="Responses, WebSocket",
        path="/v1/responses",
        body=lambda tokens: {"type": "response.create", **_response(tokens)},
        socket=True,
    ),
    Protocol(
        name="Anthropic Messages",
        path="/v1/messages",
        body=lambda tokens: {"messages": MESSAGES, "max_tokens": tokens, "stream": True, "model": "demo"},
    ),
    Protocol(
        name="Ollama chat",
        path="/api/chat",
        body=lambda tokens: {"model": "demo", "messages": MESSAGES, "options": {"num_predict": tokens}},
    ),
    Protocol(
        name="Ollama generate",
        path="/api/generate",
        body=lambda tokens: {"model": "demo", "prompt": QUESTION, "options": {"num_predict": tokens}},
    ),
)


class Client:
    """A client of all protocols, with one connection."""

    def __init__(self, session: aiohttp.ClientSession, server: Server) -> None:
        self._session = session
        self._address = server.base.removesuffix("/v1")
        self._server = server
        self._sockets: dict[str, aiohttp.ClientWebSocketResponse] = {}

    async def stream(self, protocol: Protocol, tokens: int) -> None:
        """Read a response of `tokens` tokens.

        Raises:
            RuntimeError: the server answered with an error.
        """
        if protocol.socket:
            await self.message(protocol.path, protocol.body(tokens))
        else:
            await self.post(protocol.path, protocol.body(tokens))

    async def post(self, path: str, body: Body) -> bytes:
        async with self._session.post(self._address + path, json=body) as response:
            content = await response.read()
            if not response.ok or ERROR.search(content):
                raise RuntimeError(f"{path}: HTTP {response.status}: {content[:500]!r}")
            return content

    async def message(self, path: str, body: Body) -> Body:
        """Send a message, and return the response of its last event."""
        if path not in self._sockets:
            self._sockets[path] = await self._session.ws_connect(self._address + path)
        await self._sockets[path].send_json(body)
        while True:
            event: Body = await self._sockets[path].receive_json()
            if event["type"] in ("response.completed", "response.incomplete"):
                response: Body = event["response"]
                return response
            if event["type"] in ("error", "response.failed"):
                raise RuntimeError(f"{path}: {event}")

    def cpu_seconds(self) -> float:
        return sum(self._server.cpu_seconds().values())


async def measure_tokens(client: Client, rounds: int, requests: int, tokens: int) -> Mapping[str, Sequence[float]]:
    """Return the server's CPU seconds per token of each round, by protocol; a first round warms up."""
    costs: dict[str, list[float]] = defaultdict(list)
    for number in range(-1, rounds):
        for protocol in PROTOCOLS:
            seconds = []
            for length in (1, tokens):
                before = client.cpu_seconds()
                for _ in range(requests):
                    await client.stream(protocol, length)
                seconds.append(client.cpu_seconds() - before)
            if number >= 0:
                costs[protocol.name].append((seconds[1] - seconds[0]) / requests / (tokens - 1))
    return costs


async def calls_by_http(client: Client) -> None:
    """Make `CALLS` calls in a row, each of which continues a stored response."""

    async def create(body: Body) -> Body:
        response: Body = json.loads(await client.post("/v1/responses", body))
        return response

    await _calls(create)


async def calls_by_socket(client: Client) -> None:
    """Make the same calls over one WebSocket."""
    await _calls(lambda body: client.message("/v1/responses", {"type": "response.create", "store": False, **body}))


async def _calls(create: Callable[[Body], Awaitable[Body]]) -> None:
    body: Body = {"input": QUESTION}
    for _ in range(CALLS):
        response = await create({**body, "tools": [TOOL], "top_p": CALL_TOP_P, "max_output_tokens": CALL_TOKENS})
        (call,) = response["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
        body = {"input": [result], "previous_response_id": response["id"]}


async def measure_calls(client: Client, rounds: int) -> Mapping[str, Sequence[float]]:
    """Return the seconds of a conversation of `CALLS` calls in each round, by transport; a first round warms up."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for number in range(-1, rounds):
        for name, converse in (("HTTP", calls_by_http), ("WebSocket", calls_by_socket)):
            begin = time.perf_counter()
            await converse(client)
            if number >= 0:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def table(costs: Mapping[str, Sequence[float]], calls: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the lines of two tables in Markdown."""
    base = costs[PROTOCOLS[0].name]
    lines = ["| Protocol | CPU per token, µs | to Chat Completions |", "|---|---|---|"]
    for name, values in costs.items():
        ratio = statistics.median(value / other for value, other in zip(values, base, strict=True))
        lines.append(f"| {name} | {1e6 * statistics.median(values):.0f} | {ratio:.2f} |")
    lines += ["", f"| {CALLS} tool calls in a row | ms per call |", "|---|---|"]
    lines += [f"| {name} | {1e3 * statistics.median(values) / CALLS:.1f} |" for name, values in calls.items()]
    return lines


async def measure(server: Server, rounds: int, requests: int, tokens: int) -> list[str]:
    """Return the lines of the tables."""
    timeout = aiohttp.ClientTimeout(total=READ_TIMEOUT)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        client = Client(session, server)
        costs = await measure_tokens(client, rounds, requests, tokens)
        return table(costs, await measure_calls(client, rounds))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--requests", type=int, default=5, help="requests of each length in a round (%(default)s)")
    parser.add_argument("--tokens", type=int, default=600, help="tokens of a long response (%(default)s)")
    given = parser.parse_args(arguments)
    if min(given.rounds, given.requests) < 1 or not 2 <= given.tokens <= TEXT_TOKENS:
        parser.error(f"at least one round and one request, and 2 to {TEXT_TOKENS} tokens")
    launch = Launch(name="scripted", command=(sys.executable, "-m", "benchmarks.scripted_server", "{port}"))
    with end_with_us(), tempfile.TemporaryDirectory() as folder:
        server = Server(launch, Path(folder) / "server.log")
        try:
            print("\n".join(asyncio.run(measure(server, given.rounds, given.requests, given.tokens))))
        finally:
            server.stop()


if __name__ == "__main__":
    main()
