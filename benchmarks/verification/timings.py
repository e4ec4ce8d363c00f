"""Time to first token and time per token of an engine in this process, for one user and for eight."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image as PILImage

from benchmarks.models import CACHE, Shape, ensure_model, write_model
from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.plugins import Registry

USERS = (1, 8)
ROUNDS = 3
"""Requests of each user, one after the other; the medians of all are reported."""

TINY = Shape(
    hidden=64, inner=96, layers=1, heads=2, kv_heads=1, sections=(4, 6, 6), tower_width=32, tower_layers=1,
    tower_heads=2,
)  # fmt: skip
"""What the test suite times, where only the way to the figures is of interest."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What each request is.

    Attributes:
        side: of its square image, in pixels.
        tokens: of its response.
    """

    side: int
    tokens: int


LOADS = {"small": Load(side=448, tokens=64), "tiny": Load(side=56, tokens=8)}


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One line of the report; times are medians.

    Attributes:
        users: that send requests at the same time.
        prompt_tokens: of each request, image included.
        first: seconds to the first text.
        each: seconds for each further token.
        rate: tokens per second of all users together.
    """

    users: int
    prompt_tokens: int
    first: float
    each: float
    rate: float


@dataclass(frozen=True, kw_only=True)
class _Sample:
    prompt_tokens: int
    first: float
    each: float


def ensure_timing_model(name: str, scratch: Path) -> Path:
    """The folder of `small`, kept in the user's cache, or of `tiny`, made in `scratch`."""
    if name != "tiny":
        return ensure_model(name, CACHE)
    folder = scratch / name
    folder.mkdir()
    write_model(TINY, folder)
    return folder


def measure(registry: Registry, *, device: str, folder: Path, load: Load) -> list[Timing]:
    """Timings in bfloat16, after one request that is not counted: it pays for what is loaded on first use."""
    config = EngineConfig(model=str(folder), device=device, dtype="bfloat16", decoder="torch", max_model_len=4096)
    with Engine(config, registry=registry) as engine:
        return asyncio.run(_measure(engine, load))


async def _measure(engine: Engine, load: Load) -> list[Timing]:
    source = random.Random(0)
    for users in USERS:  # the batch size too is new once
        await asyncio.gather(*(_ask(engine, load, source) for _ in range(users)))
    timings = []
    for users in USERS:
        begin = time.perf_counter()
        rounds = await asyncio.gather(*(_user(engine, load, source) for _ in range(users)))
        seconds = time.perf_counter() - begin
        samples = [sample for samples in rounds for sample in samples]
        timings.append(
            Timing(
                users=users,
                prompt_tokens=max(sample.prompt_tokens for sample in samples),
                first=statistics.median(sample.first for sample in samples),
                each=statistics.median(sample.each for sample in samples),
                rate=len(samples) * load.tokens / seconds,
            )
        )
    return timings


async def _user(engine: Engine, load: Load, source: random.Random) -> list[_Sample]:
    return [await _ask(engine, load, source) for _ in range(ROUNDS)]


async def _ask(engine: Engine, load: Load, source: random.Random) -> _Sample:
    """One streamed request about a new image, so that no cache helps.

    Raises:
        RuntimeError: the response has not the number of tokens that was requested.
    """
    request = {
        "messages": [{"role": "user", "content": _content(load.side, source)}],
        "max_tokens": load.tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begin, arrivals, usage = time.perf_counter(), list[float](), None
    async with contextlib.aclosing(engine.astream(request)) as chunks:
        async for chunk in chunks:
            if chunk.choices and chunk.choices[0].delta.content:
                arrivals.append(time.perf_counter())
            usage = chunk.usage or usage
    if usage is None or usage.completion_tokens != load.tokens or not arrivals:
        raise RuntimeError(f"{usage and usage.completion_tokens} tokens instead of {load.tokens}")
    each = (arrivals[-1] - arrivals[0]) / max(1, load.tokens - 1)
    return _Sample(prompt_tokens=usage.prompt_tokens, first=arrivals[0] - begin, each=each)


def _content(side: int, source: random.Random) -> list[dict[str, Any]]:
    buffer = io.BytesIO()
    PILImage.frombytes("RGB", (side, side), source.randbytes(3 * side * side)).save(buffer, "PNG", compress_level=0)
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    words = " ".join("".join(source.choices("abcdefghij", k=3)) for _ in range(8))
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": words}]
