"""Time a model: passes of the vision encoder, requests of an engine in this process, and decode steps."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import random
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from PIL import Image as PILImage

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.decoders import Decoder, DecodeRequest, Sampling, Token
from dashinfer_vlm_core.engine import load_pipeline
from dashinfer_vlm_core.engine.chat_pipeline import ChatPipeline
from dashinfer_vlm_core.engine.observers import RequestObserver
from dashinfer_vlm_core.kernels import KernelSelector
from dashinfer_vlm_core.models.interface import Grid, Patches
from dashinfer_vlm_core.plugins import Registry
from dashinfer_vlm_core.protocol import ChatRequest

from ..completion_stats import Completion
from .checkpoint_files import PIXELS, VOCABULARY
from .device_limits import best_seconds
from .profiling import DeviceProfile, KernelShare, record
from .speed_models import SpeedModel
from .time_limit import TimeLimit
from .workloads import step_bytes, tower_flop

USERS = (1, 8, 32)
"""Users that send requests at the same time, and sequences in a decode step."""
BATCHES = (1, 4, 16)
"""Images in a pass of the vision encoder."""
WARMUP_STEPS = 4
MAX_TOKENS = 3000
"""Of a sequence whose decode steps are timed, which is canceled: more than are decoded while the profiler starts."""
MIN_PROFILE_SECONDS = 0.05
LISTED_KERNELS = 8

Content: TypeAlias = "list[dict[str, Any]]"
"""The content of a message: an image, and then a text."""
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is requested of a model.

    Attributes:
        side: of the square images, in pixels.
        tokens: of a response.
        context: tokens of the prompts of timed decode steps.
        steps: number of timed decode steps.
        rounds: requests of each user, one after the other.
    """

    side: int = 448
    tokens: int = 64
    context: int = 256
    steps: int = 48
    rounds: int = 3

    @property
    def patches(self) -> int:
        """Patches of an image."""
        patches: int = (self.side // PIXELS["patch_size"]) ** 2
        return patches


TINY_LOAD = Load(side=56, tokens=4, context=16, steps=4, rounds=1)
"""For the model whose figures mean nothing."""


@dataclass(frozen=True, kw_only=True)
class TowerTiming:
    """Passes of the vision encoder.

    Attributes:
        images: in a pass.
        seconds: of a pass.
        flop_per_second: floating-point operations of the model, without padding.
    """

    images: int
    seconds: float
    flop_per_second: float


@dataclass(frozen=True, kw_only=True)
class RequestTiming:
    """Requests of several users at the same time. Times are medians in seconds.

    Attributes:
        workload: what is requested.
        users: number of users.
        prompt_tokens: of the longest prompt, images included.
        ttft: time to the first token.
        tpot: time per token after the first one.
        tokens_per_second: of all users together.
        requests_per_second: of all users together.
    """

    workload: str
    users: int
    prompt_tokens: int
    ttft: float
    tpot: float
    tokens_per_second: float
    requests_per_second: float


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """Decode steps of sequences without images.

    Attributes:
        sequences: in a step.
        context: tokens of each sequence, on average.
        seconds: of a step; the median.
        bytes_per_second: the weights, keys and values that a step reads.
        idle_share: the share of the time in which the device is idle; None if it was not measured.
        kernels: those that take most of the time of a step; none if they were not recorded.
    """

    sequences: int
    context: int
    seconds: float
    bytes_per_second: float
    idle_share: float | None
    kernels: tuple[KernelShare, ...] = ()


@dataclass(kw_only=True)
class ModelTimings:
    """The timings of one model.

    Attributes:
        name: of the model.
        title: what it is.
        load: what was requested.
        towers, requests, steps: what was measured.
        fault: why the measurement ended early; empty if it did not.
    """

    name: str
    title: str
    load: Load
    towers: list[TowerTiming] = field(default_factory=list)
    requests: list[RequestTiming] = field(default_factory=list)
    steps: list[StepTiming] = field(default_factory=list)
    fault: str = ""


class ModelTimer:
    """Times one model in bfloat16.

    Args:
        model: its shape.
        folder: its checkpoint.
        registry: has its family and the decoder.
        device: as torch names it.
        limit: skips what does not fit into the time.
        traces: an existing folder for the traces of the profiler; None writes none.
        note: is called with the name of each part before it runs.
        decoder: the name of the decoder. The vision encoder is timed only with `torch`: it is the same with others.
        cache: the cache folder; the user's if None.
    """

    def __init__(
        self,
        model: SpeedModel,
        folder: Path,
        registry: Registry,
        *,
        device: str,
        limit: TimeLimit,
        traces: Path | None,
        note: Callable[[str], None],
        decoder: str = "torch",
        cache: Path | None = None,
    ) -> None:
        self._model = model
        self._folder = folder
        self._registry = registry
        self._device = device
        self._limit = limit
        self._traces = traces
        self._note = note
        self._random = random.Random(0)  # noqa: S311 - reproducible, not secret
        self._config = EngineConfig(
            model=str(folder),
            device=device,
            dtype="bfloat16",
            decoder=decoder,
            cache_dir=cache,
            max_model_len=4096,
            max_batch_size=max(USERS),
            # Random weights repeat themselves, and several tokens of a step would look like several steps.
            speculative_method="none",
        )

    def measure(self, timings: ModelTimings) -> None:
        """Measure everything that fits into the time; the results up to an exception are in `timings`."""
        if self._config.decoder == "torch":
            self._towers(timings)
        asyncio.run(self._pipeline(timings))

    def _towers(self, timings: ModelTimings) -> None:
        family = self._registry.family_of(self._folder)
        spec = family.load_spec(self._folder)
        kernels = KernelSelector(self._registry.kernels.values(), self._config)
        encoder = family.load_vision_encoder(spec, self._config, kernels)
        load, last = timings.load, 0.0
        for images in BATCHES:
            if not self._allows(f"vision encoder, {images} images", 4 * last):
                return
            begin = time.perf_counter()
            batch = [self._patches(load) for _ in range(images)]
            seconds = best_seconds(partial(encoder.encode, batch), self._device, rounds=3, repeats=3)
            last = time.perf_counter() - begin
            flop = images * tower_flop(self._model, load.patches)
            timings.towers.append(TowerTiming(images=images, seconds=seconds, flop_per_second=flop / seconds))

    def _patches(self, load: Load) -> Patches:
        columns = 3 * PIXELS["temporal_patch_size"] * PIXELS["patch_size"] ** 2
        side = load.side // PIXELS["patch_size"]
        pixels = np.frombuffer(self._random.randbytes(side**2 * columns), np.uint8).reshape(-1, columns)
        return Patches(pixels=pixels, grid=Grid(1, side, side), tokens=side**2 // 4, kind="image", path="image")

    async def _pipeline(self, timings: ModelTimings) -> None:
        if not self._allows("requests and decode steps"):
            return
        self._note(f"{timings.name}: loading")
        pipeline, _ = await load_pipeline(self._config, self._registry, RequestObserver())
        try:
            await self._steps(pipeline.decoder, timings)
            await self._requests(pipeline, timings)
        finally:
            await pipeline.close()

    async def _steps(self, decoder: Any, timings: ModelTimings) -> None:
        for sequences in USERS:
            name = f"decode steps, {sequences} sequences"
            if timing := await self._timed(name, partial(self._step, decoder, timings, sequences)):
                timings.steps.append(timing)

    async def _step(self, decoder: Decoder, timings: ModelTimings, sequences: int) -> StepTiming:
        load = timings.load
        trace = self._traces / f"{timings.name}-{sequences}.json" if self._traces else None
        async with contextlib.AsyncExitStack() as stack:
            streams = [
                await stack.enter_async_context(contextlib.aclosing(decoder.decode(self._text(load))))
                for _ in range(sequences)
            ]
            await _read(streams, WARMUP_STEPS)
            seconds = await _step_seconds(decoder, streams, load.steps)
            profile = await self._profile(
                f"profile of decode steps, {sequences} sequences", load.steps * seconds, trace
            )
        context = load.context + WARMUP_STEPS + load.steps // 2
        moved = step_bytes(self._model, sequences=sequences, context=context)
        return StepTiming(
            sequences=sequences,
            context=context,
            seconds=seconds,
            bytes_per_second=moved / seconds,
            idle_share=profile.idle_share if profile else None,
            kernels=profile.longest(LISTED_KERNELS) if profile else (),
        )

    async def _profile(self, name: str, seconds: float, trace: Path | None) -> DeviceProfile | None:
        """Profile running sequences; None if the profiler fails, as without permission to use it."""
        try:
            with record(self._device, trace) as recorded:
                await asyncio.sleep(max(MIN_PROFILE_SECONDS, seconds))
        except Exception as error:  # noqa: BLE001 - the timings are worth their report without a profile
            self._limit.skip(f"{self._folder.name}: {name}", f"{type(error).__name__}: {error}"[:300])
            return None
        return recorded

    def _text(self, load: Load) -> DecodeRequest:
        return DecodeRequest(
            id="steps",
            token_ids=np.array(self._random.choices(range(VOCABULARY), k=load.context), np.int64),
            positions=np.tile(np.arange(load.context, dtype=np.int64), (3, 1)),
            sampling=Sampling(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True),
        )

    async def _requests(self, pipeline: ChatPipeline, timings: ModelTimings) -> None:
        load = timings.load
        for users in USERS:
            await self._workload(pipeline, timings, "new images", users=users, user=_ask, rounds=load.rounds)
        await self._workload(pipeline, timings, "chats of two turns about an image", users=users, user=_chat, rounds=1)

    async def _workload(
        self,
        pipeline: ChatPipeline,
        timings: ModelTimings,
        workload: str,
        *,
        users: int,
        user: Callable[[ChatPipeline, Load, Content], Awaitable[list[Completion]]],
        rounds: int,
    ) -> None:
        load = timings.load

        async def requests(contents: Sequence[Content]) -> list[Completion]:
            return [completion for content in contents for completion in await user(pipeline, load, content)]

        async def run() -> RequestTiming:
            await asyncio.gather(
                *(requests([self._content(load)]) for _ in range(users))
            )  # this batch size is new once
            contents = [[self._content(load) for _ in range(rounds)] for _ in range(users)]
            begin = time.perf_counter()
            completions = await asyncio.gather(*map(requests, contents))
            seconds = time.perf_counter() - begin
            return _summary(workload, users, [each for one in completions for each in one], seconds)

        if timing := await self._timed(f"{workload}, {users} users", run):
            timings.requests.append(timing)

    def _content(self, load: Load) -> Content:
        """Return a new image and a few words."""
        pixels = self._random.randbytes(3 * load.side**2)
        buffer = io.BytesIO()
        PILImage.frombytes("RGB", (load.side, load.side), pixels).save(buffer, "PNG", compress_level=0)
        url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        words = " ".join("".join(self._random.choices("abcdefghij", k=3)) for _ in range(8))
        return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": words}]

    async def _timed(self, name: str, work: Callable[[], Awaitable[_T]]) -> _T | None:
        """Run a part within the rest of the time; None if it does not fit."""
        if not self._allows(name):
            return None
        self._note(f"{self._folder.name}: {name}")
        try:
            return await asyncio.wait_for(work(), max(0.0, self._limit.remaining))
        except asyncio.TimeoutError:
            self._limit.skip(f"{self._folder.name}: {name}", "it was stopped at the time limit: see `--minutes`")
            return None

    def _allows(self, name: str, seconds: float = 0.0) -> bool:
        return self._limit.allows(f"{self._folder.name}: {name}", seconds)


async def _ask(pipeline: ChatPipeline, load: Load, content: Content) -> list[Completion]:
    """Send one request."""
    return [await _send(pipeline, [{"role": "user", "content": content}], load)]


async def _chat(pipeline: ChatPipeline, load: Load, content: Content) -> list[Completion]:
    """Send a request, and another one after its response."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    first = await _send(pipeline, messages, load)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": content[1:]}]
    return [first, await _send(pipeline, messages, load)]


async def _send(pipeline: ChatPipeline, messages: list[dict[str, Any]], load: Load) -> Completion:
    """Send a streamed request, greedy.

    Raises:
        RuntimeError: the response does not have the requested number of tokens.
    """
    request = {
        "messages": messages,
        "max_tokens": load.tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    completion = Completion(started_at=time.perf_counter())
    async with contextlib.aclosing(pipeline.stream(ChatRequest.parse(request))) as chunks:
        async for chunk in chunks:
            completion.add_chunk(chunk, time.perf_counter())
    if completion.tokens != load.tokens or completion.first_chunk_at is None:
        raise RuntimeError(f"{completion.tokens} tokens instead of {load.tokens}, with the text {completion.text!r}")
    return completion


def _summary(workload: str, users: int, completions: Sequence[Completion], seconds: float) -> RequestTiming:
    usages = [completion.usage for completion in completions if completion.usage]
    first = [completion.seconds_to_first_token or 0.0 for completion in completions]
    each = [completion.seconds_per_token or 0.0 for completion in completions]
    return RequestTiming(
        workload=workload,
        users=users,
        prompt_tokens=max(usage.prompt_tokens for usage in usages),
        ttft=statistics.median(first),
        tpot=statistics.median(each),
        tokens_per_second=sum(completion.tokens for completion in completions) / seconds,
        requests_per_second=len(completions) / seconds,
    )


async def _step_seconds(decoder: Decoder, streams: Sequence[AsyncGenerator[Token, None]], steps: int) -> float:
    """Return the time of a step, as the mean of at least `steps`.

    The decoder counts its steps, since tokens may wait for this reader. Of a decoder that does not, tokens are counted.
    """
    begin, first = time.perf_counter(), decoder.snapshot().steps
    await _read(streams, steps)
    while first and decoder.snapshot().steps - first < steps:
        await _read(streams, 1)
    counted = decoder.snapshot().steps - first
    return (time.perf_counter() - begin) / (counted or steps)


async def _read(streams: Sequence[AsyncGenerator[Token, None]], count: int) -> None:
    """Read `count` tokens of each stream."""

    async def read(stream: AsyncGenerator[Token, None]) -> None:
        for _ in range(count):
            await anext(stream)

    await asyncio.gather(*map(read, streams))


def free_memory(device: str) -> int | None:
    """Return the free memory of a CUDA device in bytes; None for others."""
    return torch.cuda.mem_get_info(device)[0] if torch.device(device).type == "cuda" else None
