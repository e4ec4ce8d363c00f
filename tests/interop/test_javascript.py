"""JavaScript clients: Anthropic's, OpenAI's, Vercel's AI SDK and LangChain.js.

`javascript/main.js` runs one of them.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks.environments import SetupMissing
from tests.clients.drivers import Color, Part, Result, Served, openai_messages
from tests.clients.features import CHECKS, RESPONSE, TEXT, cells, run, serve_script
from tests.interop import interpreters

pytestmark = pytest.mark.interop

CLIENTS = [
    "anthropic-js", "ollama-js", "openai-js", "openai-js-responses", "ai-sdk", "ai-sdk-responses", "langchain-js",
    "langchain-js-responses",
]  # fmt: skip


class JavaScriptError(Exception):
    """The client has thrown an error."""


class JavaScriptClient:
    """A process of `javascript/main.js`, which starts with the first request.

    Args:
        folder: that of the installed packages.
        name: the client's.
        served: the server.
    """

    errors: ClassVar = (JavaScriptError,)

    def __init__(self, folder: Path, name: str, served: Served) -> None:
        self._folder = folder
        self._arguments = ("main.js", name, served.url)
        self._process: asyncio.subprocess.Process | None = None

    async def _send(self, operation: str, parts: tuple[Part, ...] = ()) -> None:
        if self._process is None:
            path = f"{self._folder / 'node_modules' / '.bin'}{os.pathsep}{os.environ['PATH']}"
            self._process = await asyncio.create_subprocess_exec(
                "node", *self._arguments, cwd=self._folder, env={**os.environ, "PATH": path},
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"operation": operation, "parts": parts}).encode() + b"\n")
        await self._process.stdin.drain()

    async def _receive(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        assert line, "node has exited: its error is above"
        return json.loads(line)

    async def _call(self, operation: str, parts: tuple[Part, ...]) -> Any:
        await self._send(operation, parts)
        return _result(await self._receive())

    async def ask(self, *parts: Part) -> Result:
        return Result(**await self._call("ask", parts))

    async def call_tool(self, *parts: Part) -> list[tuple[str, dict[str, Any]]]:
        return [(name, arguments) for name, arguments in await self._call("callTool", parts)]

    async def parse(self, *parts: Part) -> object:
        return Color(**await self._call("parse", parts))

    async def continue_conversation(self, *parts: Part) -> str:
        """Ask, and ask the same again with the first question and its answer before it."""
        return await self._call("continue", parts)

    async def stream(self, *parts: Part) -> AsyncGenerator[str, None]:
        await self._send("stream", parts)
        response = await self._receive()
        try:
            while "text" in response:
                yield response["text"]
                response = await self._receive()
            _result(response)
        finally:
            if "text" in response:
                await self._send("cancel")
            while "text" in response:
                response = await self._receive()

    async def aclose(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            await self._process.communicate()


def _result(response: dict[str, Any]) -> Any:
    if "error" in response:
        raise JavaScriptError(response["error"])
    return response["result"]


@pytest.fixture(scope="module")
def served(tiny_checkpoint):
    with serve_script(str(tiny_checkpoint)) as served:
        yield served


@pytest.fixture(scope="module")
def folder() -> Path:
    """The folder with the program and the packages that it imports."""
    try:
        return interpreters.javascript()
    except SetupMissing as error:
        pytest.skip(f"the JavaScript clients are not available: {error}")


@pytest.mark.parametrize(("client", "feature"), cells(CLIENTS))
def test_client_supports_feature(folder, served, client, feature):
    CHECKS[feature](partial(JavaScriptClient, folder, client), served)


@pytest.mark.parametrize("client", CLIENTS)
def test_client_sends_answer_back_in_next_turn(folder, served, client):
    """The AI SDK's provider for OpenAI refers to the answer by the ID of its item."""

    async def scenario(driver: JavaScriptClient) -> None:
        assert await driver.continue_conversation(TEXT) == "It is a circle."

    (question,) = openai_messages([TEXT])
    served.script.play(RESPONSE)
    served.engine.chat({"messages": [question, {"role": "assistant", "content": RESPONSE}, question]})
    expected = list(served.script.requests[-1].token_ids)
    served.script.play(RESPONSE, "It is a circle.")
    run(partial(JavaScriptClient, folder, client), served, scenario)
    assert list(served.script.requests[-1].token_ids) == expected
