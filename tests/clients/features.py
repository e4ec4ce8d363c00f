"""What every client is tested for. `FEATURES` has the columns of docs/clients.md."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import Any

import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.errors import EngineError, InvalidParameter
from dashinfer_vlm_core.testing import Script, ScriptedResponse, scripted_registry
from tests.clients.drivers import Color, Part, Served, openai_messages
from tests.samples import data_url, encode_video, image_url
from tests.server.conftest import serving
from tests.waiting import until

RESPONSE = "A red circle, and a green star."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TEXT = Part("text", "What is this?")
IMAGE = Part("image", image_url(168, 168))
VIDEO = Part("video", data_url(encode_video(), "video/mp4"))


class ReplaceableScript(Script):
    """A script whose responses can be replaced, so that all tests of a file use one server.

    Attributes:
        breaks_after: the number of tokens after which the decoder fails; None means never.
    """

    def __init__(self) -> None:
        self.breaks_after: int | None = None
        super().__init__("")

    def play(self, *responses: ScriptedResponse, delay: float = 0.0, breaks_after: int | None = None) -> None:
        """Replace the responses, and forget the requests."""
        self._responses, self.breaks_after, self.delay = responses, breaks_after, delay
        self.requests.clear()

    @property
    def delay(self) -> float:
        """Seconds before each token; the decoder reads it before each one."""
        if self.breaks_after == 0:
            raise EngineError("The decoder broke.")
        if self.breaks_after is not None:
            self.breaks_after -= 1
        return self._delay

    @delay.setter
    def delay(self, seconds: float) -> None:
        self._delay = seconds


@contextlib.contextmanager
def serve_script(checkpoint: str) -> Iterator[Served]:
    """Start an engine with a scripted decoder, and a server for it."""
    script = ReplaceableScript()
    config = EngineConfig(model=checkpoint, served_model_name="tiny", decoder="scripted")
    with Engine(config, registry=scripted_registry(script)) as engine, serving(engine) as server:
        yield Served(engine, script, f"{server.url}/v1")


def run(driver: type[Any], served: Served, scenario: Callable[[Any], Awaitable[None]]) -> None:
    async def main() -> None:
        async with contextlib.aclosing(driver(served)) as client:
            await scenario(client)

    asyncio.run(main())


def check_text(driver: type[Any], served: Served) -> None:
    async def scenario(client: Any) -> None:
        assert (await client.ask(TEXT)).text == RESPONSE

    served.script.play(RESPONSE)
    run(driver, served, scenario)


def check_media(driver: type[Any], served: Served, part: Part) -> None:
    """The decoder receives the visual tokens that a direct request has."""

    async def scenario(client: Any) -> None:
        await client.ask(part, TEXT)

    served.script.play(RESPONSE)
    usage = served.engine.chat({"messages": openai_messages([part, TEXT])}).usage
    assert usage is not None
    details: Any = usage.prompt_tokens_details
    expected = {"image": details.image_tokens, "video": details.video_tokens}
    run(driver, served, scenario)
    (span,) = served.script.requests[-1].spans
    assert len(span.tokens.embedding) == expected.pop(part.kind) > 0
    assert not any(expected.values())


def check_image(driver: type[Any], served: Served) -> None:
    check_media(driver, served, IMAGE)


def check_video(driver: type[Any], served: Served) -> None:
    check_media(driver, served, VIDEO)


def check_stream(driver: type[Any], served: Served) -> None:
    async def scenario(client: Any) -> None:
        chunks = [text async for text in client.stream(TEXT)]
        assert "".join(chunks) == RESPONSE
        assert sum(map(bool, chunks)) > 3

    served.script.play(RESPONSE)
    run(driver, served, scenario)


def check_tools(driver: type[Any], served: Served) -> None:
    async def scenario(client: Any) -> None:
        assert await client.call_tool(TEXT) == [("weather", {"city": "Rome"})]

    served.script.play(CALL, RESPONSE)
    run(driver, served, scenario)


def check_structured(driver: type[Any], served: Served) -> None:
    """The decoder receives a grammar, and the client the object."""

    async def scenario(client: Any) -> None:
        assert await client.parse(TEXT) == Color(color="green")
        assert served.script.requests[-1].grammar is not None

    served.script.play(getattr(driver, "structured_response", '{"color": "green"}'))
    run(driver, served, scenario)


def check_usage(driver: type[Any], served: Served) -> None:
    async def scenario(client: Any) -> None:
        result = await client.ask(IMAGE, TEXT)
        assert result.prompt_tokens == len(served.script.requests[-1].token_ids)
        assert result.completion_tokens == expected.completion_tokens

    served.script.play(RESPONSE)
    expected = served.engine.chat({"messages": openai_messages([IMAGE, TEXT])}).usage
    assert expected is not None
    run(driver, served, scenario)


def check_errors(driver: type[Any], served: Served) -> None:
    """Before the first token, and in the middle of a stream if the client can stream."""

    async def scenario(client: Any) -> None:
        with pytest.raises(client.errors, match="This is wrong"):
            await client.ask(TEXT)
        if hasattr(client, "stream"):
            served.script.play(RESPONSE, breaks_after=4)
            received = ""
            try:
                async for text in client.stream(TEXT):
                    received += text
            except client.errors as error:
                assert "The decoder broke" in str(error)  # noqa: PT017  the text before the error is compared too
            else:
                pytest.fail("the stream ended without an exception")
            assert received
            assert RESPONSE.startswith(received)

    served.script.play(InvalidParameter("This is wrong.", param="messages"))
    run(driver, served, scenario)


def check_cancel(driver: type[Any], served: Served) -> None:
    """Closing a stream ends the request in the engine."""

    async def scenario(client: Any) -> None:
        async with contextlib.aclosing(client.stream(TEXT)) as chunks:
            async for text in chunks:
                if text:
                    break
            assert served.script.running == 1
        await asyncio.to_thread(until, lambda: served.script.running == 0)

    served.script.play(RESPONSE * 100, delay=0.1)  # would take minutes
    run(driver, served, scenario)


CHECKS: dict[str, Callable[[type[Any], Served], None]] = {
    "text": check_text,
    "image": check_image,
    "video": check_video,
    "stream": check_stream,
    "tools": check_tools,
    "structured": check_structured,
    "usage": check_usage,
    "errors": check_errors,
    "cancel": check_cancel,
}


def cells(clients: list[str], *, slow: Collection[str] = ()) -> list[Any]:
    """Return the parameters (client, feature) of a test, each with its marks, without those that have a reason.

    Args:
        clients: the clients.
        slow: those of them that do not belong to the fast tests.
    """
    from tests.clients.table import REASONS

    return [
        pytest.param(
            client,
            feature,
            marks=[pytest.mark.client(client, feature), *([pytest.mark.slow] if client in slow else ())],
            id=f"{client}-{feature}",
        )
        for client in clients
        for feature in CHECKS
        if (client, feature) not in REASONS
    ]
