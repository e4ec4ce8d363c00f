"""Timeouts, which LiteLLM leaves to the provider, and cancellation."""

from __future__ import annotations

import asyncio
import contextlib

import litellm
import pytest
from litellm.exceptions import MidStreamFallbackError

from tests.litellm.conftest import HELLO
from tests.waiting import HANG, until

pytestmark = pytest.mark.slow

LONG = "A long response that goes on and on and on. " * 20


def idle(provider):
    return lambda: provider.script.running == 0


def cause(error):
    return getattr(error, "original_exception", None) or error


@pytest.fixture
def slow(scripted):
    """Return a loaded provider whose responses take minutes."""
    provider = scripted("Ready.", LONG)
    litellm.completion(provider.model, messages=HELLO)
    provider.script.delay = 0.2
    return provider


@pytest.mark.parametrize("streamed", [False, True])
def test_timeout_raises_litellm_timeout(slow, streamed):
    with pytest.raises((litellm.Timeout, MidStreamFallbackError)) as caught:
        list(litellm.completion(slow.model, messages=HELLO, timeout=0.2, stream=streamed))
    assert isinstance(cause(caught.value), litellm.Timeout)
    assert cause(caught.value).status_code == 504
    until(idle(slow))


@pytest.mark.parametrize("streamed", [False, True])
def test_timeout_raises_litellm_timeout_on_event_loop(slow, streamed):
    async def run():
        response = await litellm.acompletion(slow.model, messages=HELLO, timeout=0.2, stream=streamed)
        async for _ in response:
            pass

    with pytest.raises((litellm.Timeout, MidStreamFallbackError)) as caught:
        asyncio.run(run())
    assert isinstance(cause(caught.value), litellm.Timeout)
    until(idle(slow))


def test_first_token_timeout_of_stream(slow):
    stream = litellm.completion(slow.model, messages=HELLO, first_token_timeout=HANG, timeout=HANG, stream=True)
    assert next(iter(stream)).choices
    stream.completion_stream.close()
    slow.script.delay = 30
    with pytest.raises(MidStreamFallbackError) as caught:
        list(litellm.completion(slow.model, messages=HELLO, first_token_timeout=0.2, stream=True))
    assert isinstance(cause(caught.value), litellm.Timeout)
    until(idle(slow))


@pytest.mark.parametrize(
    ("name", "value"),  # LiteLLM itself replaces a `timeout` of 0 by its default, and rejects text
    [("timeout", -1), ("first_token_timeout", 0), ("first_token_timeout", -1), ("first_token_timeout", "soon")],
)
def test_invalid_timeout_is_rejected(scripted, name, value):
    with pytest.raises(litellm.BadRequestError) as caught:
        list(litellm.completion(scripted("Yes.").model, messages=HELLO, stream=True, **{name: value}))
    assert caught.value.param == name


def test_canceling_task_cancels_request(slow):
    async def leave():
        task = asyncio.create_task(litellm.acompletion(slow.model, messages=HELLO))
        await asyncio.to_thread(until, lambda: slow.script.running == 1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    until(idle(slow))


def test_closing_stream_cancels_request(slow):
    async def leave():
        stream = await litellm.acompletion(slow.model, messages=HELLO, stream=True)
        async for _ in stream:
            break
        assert slow.script.running == 1
        await stream.aclose()

    asyncio.run(leave())
    until(idle(slow))


def test_closing_sync_stream_cancels_request(slow):
    """LiteLLM's wrapper has no `close` method."""
    stream = litellm.completion(slow.model, messages=HELLO, stream=True)
    next(iter(stream))
    assert slow.script.running == 1
    stream.completion_stream.close()
    until(idle(slow))
