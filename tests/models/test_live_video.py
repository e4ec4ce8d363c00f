"""Live videos in all families: what earlier requests had is found in both caches, and changes no response."""

from __future__ import annotations

import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.config import MediaLimits
from tests.conversations import as_openai, assistant, blurred_image, data_url, user
from tests.server.conftest import serving

from .test_video_units import FAMILIES

RECORDING = [blurred_image(seed) for seed in range(16)]
QUESTION = "What happens?"
RECURRENT = "qwen3_5"
"""Its prefixes are found at checkpoints alone."""


@pytest.fixture(scope="module", params=FAMILIES)
def engines(request, tmp_path_factory):
    """Return an engine with caches, one without, and the name of their model's family."""
    _, write = FAMILIES[request.param]
    model = str(write(tmp_path_factory.mktemp(request.param)))
    options = {"model": model, "dtype": "float32", "speculative_method": "none", "video_max_pixels": 112 * 112}
    limits = MediaLimits(video=8)
    with (
        Engine(EngineConfig(**options, limit_mm_per_prompt=limits)) as live,
        Engine(EngineConfig(**options, limit_mm_per_prompt=limits, prefix_cache=False, vision_cache_mib=0)) as plain,
    ):
        yield live, plain, request.param


def window(start, stop):
    """Return the question about these frames of the recording, whose size is that of 16 frames."""
    (message,) = as_openai([user(RECORDING[start:stop], QUESTION)])
    message["content"][0]["video_url"]["align"] = True
    return [message]


def ask(engine, messages, **fields):
    """Return the text, the usage, and the number of units that the vision encoder encoded."""
    before = engine.stats().vision.encoded
    body = {"messages": messages, "temperature": 0, "max_tokens": 8, "ignore_eos": True, **fields}
    response = engine.chat(body)
    return response.choices[0].message.content, response.usage, engine.stats().vision.encoded - before


@pytest.mark.timeout(300)
def test_windows_encode_new_pairs_and_appended_frames_keep_the_prefix(engines):
    live, plain, family = engines
    before = 0
    for start, stop, new in ((0, 10, 5), (0, 12, 1), (0, 14, 1), (2, 14, 0), (4, 16, 1)):
        text, usage, encoded = ask(live, window(start, stop), cache_salt="windows")
        assert text == ask(plain, window(start, stop))[0]
        assert encoded == new
        cached = usage.prompt_tokens_details.cached_tokens
        if start == 0 and before:  # all tokens of the pairs before
            assert cached >= before - (64 if family == RECURRENT else 0)
        elif start:
            assert cached < before
        before = usage.prompt_tokens_details.video_tokens
    assert ask(live, window(0, 12), cache_salt="other")[1].prompt_tokens_details.cached_tokens == 0


@pytest.mark.timeout(300)
def test_conversation_continues_with_new_frames_and_names_of_earlier_ones(engines):
    live, plain, _ = engines
    named, whole = [], []
    before = 0
    for turn in range(3):
        (message,) = as_openai([user(RECORDING[2 * turn : 2 * turn + 2], QUESTION)])
        video, question = message["content"]
        named.append({"role": "user", "content": [video | {"uuid": f"second-{turn}"}, question]})
        whole.append(message)
        text, usage, encoded = ask(live, named, cache_salt="conversation")
        assert text == ask(plain, whole)[0]
        assert encoded == 1
        assert usage.prompt_tokens_details.cached_tokens >= before - 64
        before = usage.prompt_tokens
        named[-1] = {"role": "user", "content": [{"type": "video_url", "uuid": f"second-{turn}"}, question]}
        for conversation in (named, whole):
            conversation.append(assistant(text))


def test_frames_are_told_apart_by_their_order(engines):
    live, plain, _ = engines
    turned = [*RECORDING[2:4], *RECORDING[0:2]]
    for frames in (RECORDING[:4], turned, RECORDING[:4]):
        urls = [data_url(frame) for frame in frames]
        message = {"role": "user", "content": [{"type": "video_url", "video_url": {"url": urls}}]}
        assert ask(live, [message])[0] == ask(plain, [message])[0]


@pytest.mark.timeout(300)
def test_responses_continue_with_new_frames(engines):
    live, _, _ = engines
    before = 0
    previous = None
    with serving(live) as server, server.http() as client:
        for turn in range(3):
            urls = [data_url(frame) for frame in RECORDING[2 * turn : 2 * turn + 2]]
            content = [{"type": "input_video", "video_url": {"url": urls}}, {"type": "input_text", "text": QUESTION}]
            body = {"input": [{"role": "user", "content": content}], "previous_response_id": previous, "temperature": 0}
            response = client.post("/v1/responses", json={**body, "max_output_tokens": 8, "ignore_eos": True}).json()
            previous = response["id"]
            usage = response["usage"]
            assert usage["input_tokens_details"]["cached_tokens"] >= before - 64
            before = usage["input_tokens"]
