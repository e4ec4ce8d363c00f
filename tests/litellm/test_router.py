"""LiteLLM's Router with this provider: retries, fallbacks and cooldown."""

from __future__ import annotations

import asyncio

import litellm
import pytest

from dashinfer_vlm_core.errors import DecoderFailed, InvalidParameter, QueueFull
from tests.litellm.conftest import HELLO, text_of
from tests.waiting import until

pytestmark = pytest.mark.slow

BUSY, DEAD = QueueFull("Busy.", retry_after=0), DecoderFailed("Dead.")


def deployment(group, provider, **options):
    return {
        "model_name": group,
        "litellm_params": {"model": provider.model, **options},
        "model_info": {"id": f"{group} {provider.model}"},
    }


@pytest.fixture
def router():
    """Create routers: `router(deployments, ...)`. Providers must be registered before."""
    made = []

    def start(*deployments, **options):
        router = litellm.Router(model_list=list(deployments), retry_after=0, **options)
        made.append(router)
        return router

    yield start
    for each in made:
        each.discard()


def text(response):
    return response.choices[0].message.content


async def complete(router, group="eyes", **options):
    return await router.acompletion(group, messages=HELLO, **options)


async def streamed(router, group="eyes", **options):
    return text_of([chunk async for chunk in await router.acompletion(group, messages=HELLO, stream=True, **options)])


@pytest.mark.slow
def test_failed_request_is_retried(scripted, router):
    provider = scripted(DEAD, BUSY, "Yes.")
    assert text(asyncio.run(complete(router(deployment("eyes", provider), num_retries=2)))) == "Yes."
    assert len(provider.script.requests) == 3


@pytest.mark.slow
def test_sync_router_retries(scripted, router):
    provider = scripted(DEAD, "Yes.")
    chat = router(deployment("eyes", provider), num_retries=2)
    assert text(chat.completion("eyes", messages=HELLO)) == "Yes."
    assert text_of(chat.completion("eyes", messages=HELLO, stream=True)) == "Yes."


def test_invalid_request_is_not_retried(scripted, router):
    provider = scripted(InvalidParameter("Wrong.", param="messages"), "Yes.")
    with pytest.raises(litellm.BadRequestError) as caught:
        asyncio.run(complete(router(deployment("eyes", provider), num_retries=3)))
    assert caught.value.param == "messages"
    assert len(provider.script.requests) == 1


@pytest.mark.parametrize("call", [complete, streamed])
def test_fallback_group_responds(scripted, router, call):
    bad, good = scripted(DEAD), scripted("Yes.")
    both = router(deployment("eyes", bad), deployment("other", good), num_retries=0, fallbacks=[{"eyes": ["other"]}])
    response = asyncio.run(call(both))
    assert (response if isinstance(response, str) else text(response)) == "Yes."
    assert len(bad.script.requests) == 1


@pytest.mark.slow
def test_late_stream_falls_back_to_other_group(scripted, router):
    slow, good = scripted("No.", delay=60), scripted("Yes.")
    both = router(
        deployment("eyes", slow, first_token_timeout=0.5),
        deployment("other", good),
        num_retries=0,
        fallbacks=[{"eyes": ["other"]}],
    )
    assert asyncio.run(streamed(both)) == "Yes."
    until(lambda: slow.script.running == 0)


def test_too_long_prompt_goes_to_larger_context(scripted, router):
    small, large = scripted("No."), scripted("Yes.")
    both = router(
        deployment("eyes", small, engine_options={"max_model_len": 16}),
        deployment("large", large),
        num_retries=0,
        context_window_fallbacks=[{"eyes": ["large"]}],
    )
    assert text(asyncio.run(complete(both))) == "Yes."
    assert not small.script.requests


def test_failing_deployment_cools_down(scripted, router):
    """With `allowed_fails=0`, one failure is enough: further requests go to the other deployment."""
    bad, good = scripted(DEAD), scripted("Yes.")
    both = router(deployment("eyes", bad), deployment("eyes", good), num_retries=3, allowed_fails=0, cooldown_time=100)

    async def main():
        return [text(await complete(both)) for _ in range(12)]

    assert asyncio.run(main()) == ["Yes."] * 12
    assert len(bad.script.requests) <= 2  # the Router records a failure concurrently with the next attempt


def test_router_timeout_cancels_request(scripted, router):
    provider = scripted("A long response. " * 50, delay=0.5)
    slow = router(deployment("eyes", provider, timeout=0.5), num_retries=0)
    with pytest.raises(litellm.Timeout):
        asyncio.run(complete(slow))
    until(lambda: provider.script.running == 0)
