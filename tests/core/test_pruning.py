"""Pruned items: which tokens and pairs of frames are kept, their digests and caches, and the options of requests."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.concurrency.compute import Executor
from dashinfer_vlm_core.errors import ConfigError, ContextLengthExceeded, InvalidParameter, RequestError
from dashinfer_vlm_core.media import Grid
from dashinfer_vlm_core.models.interface import VisualTokens
from dashinfer_vlm_core.models.patches import reduced
from dashinfer_vlm_core.protocol import MediaPart
from dashinfer_vlm_core.protocol.anthropic import MessagesRequest
from dashinfer_vlm_core.protocol.responses import ResponsesRequest
from dashinfer_vlm_core.testing import scripted_engine
from dashinfer_vlm_core.vision import pruning
from tests.cases import cases
from tests.conversations import as_openai, blurred_image, user
from tests.core.test_schema_media import FRAMES, IMAGE, PART, URL, VIDEO, only, rejection
from tests.core.test_vision import mean_of, run
from tests.patches import clip, random_patches


def visual(kind, grid, embedding, rate):
    embedding = torch.tensor(embedding, dtype=torch.float32)
    return VisualTokens(
        kind=kind, path="", grid=grid, tokens=len(embedding), digest=bytes(32), embedding=embedding, pruning_rate=rate
    )


# Options


@pytest.mark.parametrize("part", [IMAGE, VIDEO, FRAMES], ids=["image", "video", "frames"])
def test_part_has_a_pruning_rate(part):
    source = part[part["type"]]
    assert only(part).pruning_rate is None
    assert only({**part, part["type"]: {**source, "pruning_rate": 0.25}}).pruning_rate == 0.25
    for wrong in (-0.1, 1, "half"):
        error = rejection({**part, part["type"]: {**source, "pruning_rate": wrong}})
        assert error.param == f"{PART}.{part['type']}.pruning_rate"
    assert "must be less than 1" in rejection({**part, part["type"]: {**source, "pruning_rate": 1}}).message


@pytest.mark.parametrize("wrong", [0, 256, True])
def test_video_has_a_least_change(wrong):
    source = VIDEO["video_url"]
    assert only({**VIDEO, "video_url": {**source, "min_change": 2.5}}).min_change == 2.5
    assert rejection({**VIDEO, "video_url": {**source, "min_change": wrong}}).param == f"{PART}.video_url.min_change"


@pytest.mark.parametrize(
    ("frame", "path"),
    [
        ({**IMAGE["image_url"], "pruning_rate": 0.5}, "pruning_rate"),
        ({"type": "image_url", "image_url": {**IMAGE["image_url"], "pruning_rate": 0.5}}, "image_url.pruning_rate"),
        ({**IMAGE, "pruning_rate": 0.5}, "pruning_rate"),
    ],
)
def test_frame_has_no_pruning_rate(frame, path):
    error = rejection({"type": "video_url", "video_url": {"url": [frame]}})
    assert isinstance(error, InvalidParameter)
    assert error.param == f"{PART}.video_url.url[0].{path}"


PNG = {"type": "base64", "media_type": "image/png", "data": "AAAA"}


def responses(part, **fields):
    return ResponsesRequest.parse({"input": [{"role": "user", "content": [part]}], **fields}).to_chat().chat


def anthropic(block, **fields):
    messages = [{"role": "user", "content": [block]}]
    return MessagesRequest.parse({"max_tokens": 9, "messages": messages, **fields}).to_chat().chat


@cases(
    ("parse", "part"),
    [
        (responses, {"type": "input_image", "image_url": URL, "pruning_rate": 0.25}),
        (responses, {"type": "input_image", "image_url": {"url": URL, "pruning_rate": 0.25}}),
        (responses, {"type": "input_video", "video_url": "https://example.com/a.mp4", "pruning_rate": 0.25}),
        (responses, {"type": "input_video", "video_url": {"url": [URL]}, "pruning_rate": 0.25}),
        (responses, {"type": "input_image", "uuid": "cat", "pruning_rate": 0.25}),
        (anthropic, {"type": "image", "source": {**PNG, "pruning_rate": 0.25}}),
        (anthropic, {"type": "video", "source": {"type": "url", "url": "https://a.b/a.mp4", "pruning_rate": 0.25}}),
    ],
)
def test_part_of_another_api_has_a_pruning_rate(parse, part):
    (media,) = parse(part).media()
    assert media.pruning_rate == 0.25


@cases(
    ("parse", "part", "path"),
    [
        (responses, {"type": "input_image", "image_url": URL, "pruning_rate": 1}, "input[0].content[0].pruning_rate"),
        (
            responses,
            {"type": "input_image", "image_url": {"url": URL, "pruning_rate": 1}},
            "input[0].content[0].image_url.pruning_rate",
        ),
        (
            responses,
            {"type": "input_image", "image_url": {"url": URL, "pruning_rate": 0.5}, "pruning_rate": 0.5},
            "input[0].content[0].pruning_rate",
        ),
        (anthropic, {"type": "image", "source": {**PNG, "pruning_rate": 1}}, f"{PART}.source.pruning_rate"),
        (
            anthropic,
            {"type": "document", "source": {"type": "text", "data": "a", "pruning_rate": 0.5}},
            f"{PART}.source.pruning_rate",
        ),
    ],
)
def test_wrong_pruning_rate_of_another_api_is_rejected(parse, part, path):
    with pytest.raises(RequestError) as caught:
        parse(part)
    assert caught.value.param == path


@cases(
    ("parse", "part", "fields", "path"),
    [
        (only, {**IMAGE, "pruning_rate": 0.5}, {}, f"{PART}.pruning_rate"),
        (only, IMAGE, {"pruning_rate": 0.5}, "pruning_rate"),
        (only, IMAGE, {"mm_processor_kwargs": {"pruning_rate": 0.5}}, "mm_processor_kwargs.pruning_rate"),
        (responses, {"type": "input_image", "image_url": URL}, {"pruning_rate": 0.5}, "pruning_rate"),
        (responses, {"type": "input_text", "text": "a", "pruning_rate": 0.5}, {}, "input[0].content[0].pruning_rate"),
        (responses, {"type": "input_file", "file_url": "a", "pruning_rate": 0}, {}, "input[0].content[0].pruning_rate"),
        (anthropic, {"type": "image", "source": PNG, "pruning_rate": 0.5}, {}, f"{PART}.pruning_rate"),
    ],
)
def test_misplaced_pruning_rate_is_an_error_that_names_its_place(parse, part, fields, path):
    with pytest.raises(InvalidParameter, match="Set it next to `url` in Chat Completions") as caught:
        parse(part, **fields)
    assert caught.value.param == path


@pytest.mark.parametrize("rate", [-0.5, 1.0])
def test_rate_of_the_engine_is_less_than_one(rate):
    with pytest.raises(ConfigError, match="video_pruning_rate"):
        EngineConfig(video_pruning_rate=rate)


# Pairs of frames that hardly change


def part_of(patches, **options):
    return MediaPart(kind=patches.kind, path=patches.path, **options)


def test_change_of_one_token_keeps_a_pair():
    """The change is the largest over the tokens, and from the last pair that was kept: slow changes add up."""
    video = clip(0, 1, h=4, w=4)
    frames = np.repeat(video.pixels.reshape(1, 4, -1), 5, axis=0) // 2
    for index in range(1, 5):
        frames[index:, 1] += 2  # one of four tokens
    grid = Grid(5, 4, 4)
    video = replace(video, grid=grid, tokens=20, pixels=frames.reshape(grid.patches, -1), times=tuple(range(9)))
    for bound, steps in ((2, ()), (3, (0, 2, 4)), (5, (0, 3)), (9, (0,))):
        found = reduced(video, part_of(video, min_change=bound))
        kept = steps or tuple(range(5))
        assert (found.steps, found.grid.t, found.tokens) == (steps, len(kept), 4 * len(kept))
        assert found.pruned_tokens == found.dropped_tokens == 4 * (5 - len(kept))
        assert found.times == tuple(time for step in kept for time in video.times[2 * step : 2 * step + 2])
        np.testing.assert_array_equal(found.pixels, frames[list(kept)].reshape(-1, video.pixels.shape[1]))
        assert found.units == tuple(reduced(video, part_of(video)).units[step] for step in kept)


# Tokens


@pytest.mark.parametrize(
    ("kind", "t", "rate", "kept"),
    [("video", 4, 0.5, 8), ("video", 4, 0.3, 11), ("video", 4, 0.99, 4), ("video", 1, 0.5, 4), ("image", 1, 0.9, 1)],
)
def test_number_of_kept_tokens_is_known_before_the_encoder(kind, t, rate, kept):
    """int(tokens x (1 - rate)) as in vLLM, but at least the first frame."""
    item = replace(random_patches(t, 4, 4), kind=kind, pruning_rate=rate)
    assert (item.kept_tokens, item.pruned_tokens) == (kept, 4 * t - kept)


def test_repeated_tokens_of_an_image_are_dropped():
    """Twelve tokens repeat four directions, more than the kept tokens have: one of each is kept first."""
    directions = np.eye(4)[np.arange(12) % 4]
    for rate, kept in ((0.75, 3), (2 / 3, 4)):
        found = pruning.prune(visual("image", Grid(1, 6, 8), directions * np.arange(1, 13)[:, None], rate))
        assert len({row % 4 for row in found.kept_rows}) == kept
    found = pruning.prune(visual("image", Grid(1, 6, 8), directions, 0.5))
    assert len(set(found.kept_rows)) == 6  # more than there are dimensions
    assert torch.equal(found.embedding, torch.tensor(directions, dtype=torch.float32)[found.kept_rows])


class CountingExecutor(Executor):
    tasks: int = 0

    def run(self, work):
        self.tasks += 1
        return work()


def test_images_are_pruned_in_short_tasks(monkeypatch):
    executor = CountingExecutor()
    monkeypatch.setattr(pruning, "executor_for", lambda device: executor)
    item = visual("image", Grid(1, 8, 12), np.random.default_rng(0).normal(size=(24, 8)), 0.5)
    expected = pruning.prune(item).kept_rows
    executor.tasks = 0
    monkeypatch.setattr(pruning, "TASK_STEPS", 2)
    np.testing.assert_array_equal(pruning.prune(item).kept_rows, expected)
    assert executor.tasks >= 24 // 2 + 12 // 2


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_change_no_number(wrong):
    """An encoder in float16 can overflow."""
    for kind, grid in (("image", Grid(1, 6, 8)), ("video", Grid(3, 4, 4))):
        rows = np.random.default_rng(0).normal(size=(12, 4))
        rows[5] = wrong
        assert len(set(pruning.prune(visual(kind, grid, rows, 0.5)).kept_rows)) == 6


def test_large_images_are_pruned_in_strips(monkeypatch):
    monkeypatch.setattr(pruning, "STRIP_TOKENS", 10)
    values = np.random.default_rng(0).normal(size=(24, 8))
    found = pruning.prune(visual("image", Grid(1, 8, 12), values, 0.4)).kept_rows
    assert len(found) == 14
    assert list(found) == sorted(set(found))
    assert [int(((found >= start) & (found < start + 8)).sum()) for start in (0, 8, 16)] == [4, 5, 5]


def test_first_frame_and_changed_tokens_of_a_video_are_kept():
    frames = np.tile(np.eye(4), (3, 1, 1))
    frames[1, 2] = frames[2, 2] = [1, 1, 0, 0]
    frames[2, 3] = [0, 0, 1, 2]
    found = pruning.prune(visual("video", Grid(3, 4, 4), frames.reshape(12, 4), 0.5))
    assert found.kept_rows.tolist() == [0, 1, 2, 3, 4 + 2, 8 + 3]


# The cache


def test_rates_share_encoded_units_and_have_their_own_digests():
    async def scenario(tower, service):
        video = clip(0, 4)
        items = [replace(video, pruning_rate=rate) for rate in (0.0, 0.25, 0.5)]
        whole, *pruned = [(await service.embed([item]))[0] for item in items]
        assert service.stats.encoded == 4
        assert torch.equal(whole.embedding, mean_of(video))
        assert whole.digest == video.digest
        assert len({whole.digest, *(item.digest for item in pruned)}) == 3
        assert [len(item.embedding) for item in pruned] == [12, 8]
        again = await service.find(items[2])
        assert again.digest == pruned[1].digest
        assert torch.equal(again.embedding, pruned[1].embedding)
        assert torch.equal((await service.find(video)).embedding, whole.embedding)

    run(scenario, cache_bytes=1 << 20)


# Requests


def with_options(frames=8, **options):
    messages = as_openai([user([blurred_image(seed) for seed in range(frames)], "What happens?")])
    messages[0]["content"][0]["video_url"] |= options
    return {"messages": messages, "max_tokens": 2}


@pytest.fixture(scope="module")
def engine(tiny_checkpoint):
    with scripted_engine("ok", model=str(tiny_checkpoint), video_pruning_rate=0.5, media_workers=1) as engine:
        yield engine


@pytest.mark.parametrize(("options", "kept"), [({}, 32), ({"pruning_rate": 0.25}, 48), ({"pruning_rate": 0}, 64)])
def test_usage_says_what_was_dropped(engine, options, kept):
    """The rate of the engine applies to videos without one; a stream's usage is the same."""
    request = with_options(**options)
    usage = engine.chat(request).usage.prompt_tokens_details.model_dump()
    assert usage["video_tokens"] == kept
    assert usage.get("pruned_tokens", 0) == 64 - kept
    *_, last = engine.stream(request | {"stream": True, "stream_options": {"include_usage": True}})
    assert last.usage.prompt_tokens_details.model_dump() == usage


def test_preview_shows_what_is_dropped(engine):
    preview = asyncio.run(engine.apreview(with_options()))
    assert (preview.items[0].kept_tokens, preview.items[0].pruned_tokens) == (32, 32)


@pytest.mark.parametrize("workers", [0, 1])
def test_pruned_video_fits_a_context_that_the_whole_one_exceeds(tiny_checkpoint, workers):
    options = {"model": str(tiny_checkpoint), "max_model_len": 120, "media_workers": workers}
    with scripted_engine("ok", **options) as engine:
        for rate in (0, 0.25, 0.5):
            with pytest.raises(ContextLengthExceeded):
                engine.chat(with_options(16, pruning_rate=rate))
        assert engine.chat(with_options(16, pruning_rate=0.75)).usage.prompt_tokens < 120


@pytest.mark.parametrize("workers", [0, 1])
def test_tokens_before_pruning_are_limited_to_four_contexts(tiny_checkpoint, workers):
    options = {"model": str(tiny_checkpoint), "max_model_len": 120, "media_workers": workers}
    with scripted_engine("ok", **options) as engine:
        assert engine.chat(with_options(56, pruning_rate=0.9)).usage.prompt_tokens < 120
        several = with_options(32, pruning_rate=0.9)
        several["messages"] = several["messages"] * 2
        for request in (with_options(64, pruning_rate=0.9), several):
            with pytest.raises(ContextLengthExceeded, match="512 tokens before pruning, but at most 480"):
                engine.chat(request)


@pytest.mark.parametrize("workers", [0, 1])
def test_still_videos_fit_by_what_remains_of_them(tiny_checkpoint, workers):
    options = {"model": str(tiny_checkpoint), "max_model_len": 120, "media_workers": workers}
    with scripted_engine("ok", **options) as engine:
        still = as_openai([user([blurred_image(0)] * 124, "What happens?")])
        still[0]["content"][0]["video_url"] |= {"min_change": 2}
        request = {"messages": still * 2, "max_tokens": 2}
        assert engine.chat(request).usage.prompt_tokens_details.video_tokens == 32
        with pytest.raises(ContextLengthExceeded):
            engine.chat(with_options(32, min_change=0.01))


def test_video_by_uuid_is_pruned_alike(engine):
    sent = with_options()
    sent["messages"][0]["content"][0]["uuid"] = "clip"
    referred = [{"type": "video_url", "video_url": None, "uuid": "clip"}, *sent["messages"][0]["content"][1:]]
    named = {"messages": [{"role": "user", "content": referred}], "max_tokens": 2}
    assert engine.chat(sent).usage == engine.chat(named).usage
    referred[0] = {"type": "video_url", "video_url": {"pruning_rate": 0.25}, "uuid": "clip"}
    with pytest.raises(InvalidParameter) as caught:
        engine.chat(named)
    assert caught.value.code == "uuid_not_cached"
