"""Time the parts of a model in bfloat16, and the device that bounds them. `dashinfer-vlm bench` measures requests."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # public, not exported explicitly
from torch.profiler import ProfilerActivity, profile

from dashinfer_vlm_core.decoders import Decoder, Sampling, Token
from dashinfer_vlm_core.models.interface import VisionEncoder

from .checkpoint import Checkpoint, PromptBuilder
from .models import SIZES, Weights, build_model, count_weights, write_model
from .report import Results, Timing

SEQUENCES = (1, 8, 32)  # in a decode step
IMAGES = (1, 4, 16)  # in a pass of the vision encoder
SIDE = 448  # of an image, in pixels
PROMPTS = (512, 2048)
CONTEXT = 256  # tokens of a prompt before decode steps
WARMUP_STEPS = 4
STEPS = 32
MAX_TOKENS = 2000  # of a sequence that is canceled after the timing: more than are decoded while the profiler starts
MIN_PROFILE_SECONDS = 0.05
ROUNDS = 4  # the fastest one counts
SECONDS_PER_BYTE = 12e-9  # to write and load a model
EXTRA_MEMORY = 8 << 30  # of the device, for what is not weights: the KV cache of 4 GiB, and activations


async def measure_limits(results: Results) -> None:
    """Measure with tensors that fill the device; on a CPU with smaller ones."""
    device = results.device
    count, side = (1 << 30, 8192) if torch.device(device).type == "cuda" else (1 << 25, 256)
    source = torch.ones(count, dtype=torch.uint8, device=device)
    matrix = torch.randn(side, side, device=device).to(torch.bfloat16)
    copy = _best_seconds(partial(torch.empty_like(source).copy_, source), device)
    multiply = _best_seconds(partial(torch.mm, matrix, matrix, out=torch.empty_like(matrix)), device)
    results.limits = {"copy": 2 * count / copy, "product": 2 * side**3 / multiply}


async def time_model(results: Results, checkpoint: Checkpoint, family: str) -> None:
    """Write a model to the checkpoint's folder, whose name is one of `SIZES`, and time its parts."""
    size = checkpoint.folder.name
    model = build_model(family, SIZES[size])
    weights = count_weights(model)
    nbytes = model.get_memory_footprint()
    if not results.allows(f"model {size}", SECONDS_PER_BYTE * nbytes):
        return
    if checkpoint.is_on_cuda and nbytes + EXTRA_MEMORY > (free := torch.cuda.mem_get_info(checkpoint.device)[0]):
        needed = f"it needs about {(nbytes + EXTRA_MEMORY) / 1e9:.1f} GB of memory"
        results.skipped[f"model {size}"] = f"{needed}, and {free / 1e9:.1f} GB of the device are free"
        return
    write_model(model, checkpoint.folder)
    await ModelTimer(results, checkpoint, weights, "torch").encoder()
    for decoder in ["torch", *(name for name, reason in checkpoint.other_decoders().items() if not reason)]:
        free_memory()
        await ModelTimer(results, checkpoint, weights, decoder).decoder()


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


class ModelTimer:
    """Times one model with one decoder."""

    def __init__(self, results: Results, checkpoint: Checkpoint, weights: Weights, decoder: str) -> None:
        self._results = results
        self._checkpoint = checkpoint
        self._weights = weights
        self._name = checkpoint.folder.name if decoder == "torch" else f"{checkpoint.folder.name}, {decoder}"
        # Random weights repeat themselves, and several tokens of a step would look like several steps.
        options = {"max_model_len": 4096, "max_batch_size": max(SEQUENCES), "speculative_method": "none"}
        self._config = checkpoint.config("bfloat16", decoder=decoder, **options)
        self._builder = PromptBuilder(checkpoint)

    async def encoder(self) -> None:
        encoder = self._checkpoint.load_encoder(self._config)
        estimate = 0.0  # a pass cannot be interrupted
        for images in IMAGES:
            name = f"{self._name}: vision encoder, {images} images"
            begin = self._results.seconds
            if self._results.allows(name, estimate):
                await self._results.time(name, partial(self._pass, encoder, images))
                estimate = 4 * (self._results.seconds - begin)

    async def decoder(self) -> None:
        async with self._checkpoint.decoding(self._config) as decoder:
            for tokens in PROMPTS:
                name = f"{self._name}: prompt of {tokens} tokens"
                await self._results.time(name, partial(self._prefill, decoder, tokens))
            for sequences in SEQUENCES:
                name = f"{self._name}: decode step, {sequences} sequences"
                await self._results.time(name, partial(self._step, decoder, sequences))

    async def _pass(self, encoder: VisionEncoder, images: int) -> Timing:
        batch = [self._builder.image(SIDE, SIDE) for _ in range(images)]
        seconds = _best_seconds(partial(encoder.encode, batch), self._checkpoint.device)
        patches = sum(item.grid.patches for item in batch)
        return Timing(seconds, images, "images", 2 * patches * self._weights.vision, "product")

    async def _prefill(self, decoder: Decoder, tokens: int) -> Timing:
        seconds = list[float]()
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            async with self._decode(decoder, tokens) as stream:
                await anext(stream)
            seconds.append(time.perf_counter() - begin)
        work = 2 * (tokens * self._weights.text + self._weights.head)
        return Timing(min(seconds), tokens, "tokens", work, "product")

    async def _step(self, decoder: Decoder, sequences: int) -> Timing:
        async with contextlib.AsyncExitStack() as stack:
            opened = [self._decode(decoder, CONTEXT) for _ in range(sequences)]
            streams = [await stack.enter_async_context(stream) for stream in opened]
            await _read(streams, WARMUP_STEPS)
            seconds = await _step_seconds(decoder, streams)
            idle = await self._profile(sequences, STEPS * seconds) if self._checkpoint.is_on_cuda else None
        tokens = sequences * (CONTEXT + WARMUP_STEPS + STEPS // 2)
        work = 2 * (self._weights.text + self._weights.head + tokens * self._weights.kv)
        return Timing(seconds, sequences, "tokens", work, "copy", idle)

    async def _profile(self, sequences: int, seconds: float) -> float | None:
        """Return the share of the time in which the device is idle; None if the profiler fails."""
        try:
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:  # recording the host would slow it down
                await asyncio.sleep(max(MIN_PROFILE_SECONDS, seconds))
                torch.cuda.synchronize(self._checkpoint.device)
        except Exception as error:  # noqa: BLE001 - the time of a step is worth its report without a profile
            self._results.skipped[f"{self._name}: profile of {sequences} sequences"] = str(error)
            return None
        events = [each for each in profiler.events() or () if each.device_type == DeviceType.CUDA]
        kernels = [each.time_range for each in events if not getattr(each, "is_user_annotation", False)]
        return idle_share([(each.start, each.end) for each in kernels])

    def _decode(self, decoder: Decoder, tokens: int) -> contextlib.aclosing[AsyncGenerator[Token, None]]:
        prompt = self._builder.prompt("timing", self._builder.text(tokens))
        sampling = Sampling(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        return contextlib.aclosing(decoder.decode(prompt.request([], sampling)))


@torch.inference_mode()
def _best_seconds(work: Callable[[], object], device: str) -> float:
    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda _: None
    seconds = list[float]()
    for _ in range(ROUNDS):
        wait(device)
        begin = time.perf_counter()
        for _ in range(ROUNDS):
            work()
        wait(device)
        seconds.append((time.perf_counter() - begin) / ROUNDS)
    return min(seconds)


async def _step_seconds(decoder: Decoder, streams: Sequence[AsyncGenerator[Token, None]]) -> float:
    # The decoder counts its steps, since tokens may wait for this reader; if it does not, tokens are counted.
    begin = time.perf_counter()
    first = decoder.snapshot().steps
    await _read(streams, STEPS)
    while first and decoder.snapshot().steps - first < STEPS:
        await _read(streams, 1)
    return (time.perf_counter() - begin) / (decoder.snapshot().steps - first or STEPS)


async def _read(streams: Sequence[AsyncGenerator[Token, None]], count: int) -> None:
    for _ in range(count):
        await asyncio.gather(*map(anext, streams))


def idle_share(busy: Sequence[tuple[float, float]]) -> float | None:
    """Return the share of the time from the first start to the last end that no (start, end) covers."""
    begin = end = min((first for first, _ in busy), default=0.0)
    covered = 0.0
    for first, last in sorted(busy):
        covered += max(0.0, last - max(first, end))
        end = max(end, last)
    return 1.0 - covered / (end - begin) if end > begin else None
