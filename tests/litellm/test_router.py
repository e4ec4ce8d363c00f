"""LiteLLM's Router over our provider: what may succeed elsewhere is tried elsewhere, the rest is not."""

from __future__ import annotations

import asyncio

import litellm
import pytest

from dashinfer_vlm_core.errors import DecoderFailed, InvalidParameter, QueueFull
from tests.litellm.conftest import HELLO, text_of
from tests.waiting import until

BUSY, DEAD = QueueFull("Busy.", retry_after=0), DecoderFailed("Dead.")


def deployment(group, provider, **options):
    return {
        "model_name": group,
        "litellm_params": {"model": provider.model, **options},
        "model_info": {"id": f"{group} {provider.model}"},
    }


@pytest.fixture
def router():
    """`router(deployments, ...)`; made after the providers are registered, as users do."""
    made = []

    def start(*deployments, **options):
        router = litellm.Router(model_list=list(deployments), retry_after=0, **options)
        made.append(router)
        return router

    yield start
    for each in made:
        each.discard()


def text(answer):
    return answer.choices[0].message.content


async def asked(router, group="eyes", **options):
    return await router.acompletion(group, messages=HELLO, **options)


async def streamed(router, group="eyes", **options):
    return text_of([chunk async for chunk in await router.acompletion(group, messages=HELLO, stream=True, **options)])


@pytest.mark.slow
def test_what_failed_is_tried_again(scripted, router):
    provider = scripted(DEAD, BUSY, "Yes.")
    assert text(asyncio.run(asked(router(deployment("eyes", provider), num_retries=2)))) == "Yes."
    assert len(provider.script.requests) == 3


def test_a_sync_router_tries_again_too(scripted, router):
    provider = scripted(DEAD, "Yes.")
    chat = router(deployment("eyes", provider), num_retries=2)
    assert text(chat.completion("eyes", messages=HELLO)) == "Yes."
    assert text_of(chat.completion("eyes", messages=HELLO, stream=True)) == "Yes."


def test_a_wrong_request_is_not_tried_again(scripted, router):
    provider = scripted(InvalidParameter("Wrong.", param="messages"), "Yes.")
    with pytest.raises(litellm.BadRequestError) as caught:
        asyncio.run(asked(router(deployment("eyes", provider), num_retries=3)))
    assert caught.value.param == "messages"
    assert len(provider.script.requests) == 1


@pytest.mark.parametrize("ask", [asked, streamed])
def test_another_group_answers_where_one_fails(scripted, router, ask):
    bad, good = scripted(DEAD), scripted("Yes.")
    both = router(deployment("eyes", bad), deployment("other", good), num_retries=0, fallbacks=[{"eyes": ["other"]}])
    answer = asyncio.run(ask(both))
    assert (answer if isinstance(answer, str) else text(answer)) == "Yes."
    assert len(bad.script.requests) == 1


def test_a_late_stream_is_answered_by_another_group(scripted, router):
    slow, good = scripted("No.", delay=60), scripted("Yes.")
    both = router(
        deployment("eyes", slow, first_token_timeout=0.5),
        deployment("other", good),
        num_retries=0,
        fallbacks=[{"eyes": ["other"]}],
    )
    assert asyncio.run(streamed(both)) == "Yes."
    until(lambda: slow.script.running == 0)


def test_a_prompt_that_does_not_fit_goes_to_the_larger_context(scripted, router):
    small, large = scripted("No."), scripted("Yes.")
    both = router(
        deployment("eyes", small, engine_options={"max_model_len": 16}),
        deployment("large", large),
        num_retries=0,
        context_window_fallbacks=[{"eyes": ["large"]}],
    )
    assert text(asyncio.run(asked(both))) == "Yes."
    assert not small.script.requests


def test_a_deployment_that_fails_rests(scripted, router):
    """With `allowed_fails=0` one failure is enough: what follows goes to the other one."""
    bad, good = scripted(DEAD), scripted("Yes.")
    both = router(deployment("eyes", bad), deployment("eyes", good), num_retries=3, allowed_fails=0, cooldown_time=100)

    async def main():
        return [text(await asked(both)) for _ in range(12)]

    assert asyncio.run(main()) == ["Yes."] * 12
    assert len(bad.script.requests) <= 2  # the Router notes a failure beside the next attempt


def test_a_deadline_of_the_router_is_kept(scripted, router):
    provider = scripted("A long answer. " * 50, delay=0.5)
    slow = router(deployment("eyes", provider, timeout=0.5), num_retries=0)
    with pytest.raises(litellm.Timeout):
        asyncio.run(asked(slow))
    until(lambda: provider.script.running == 0)
