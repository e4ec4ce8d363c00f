"""`dashinfer-vlm bench`: what a person's own machine does with chats of a chosen shape."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from dashinfer_vlm_core.cli.terminal import show_table
from dashinfer_vlm_core.config.config_file import ConfiguredCommand
from dashinfer_vlm_core.errors import DashInferVLMError

from .completion_stats import Completion
from .engines import Command, EngineSource, engine_options

if TYPE_CHECKING:
    from .engines import AnyEngine

WORDS = ("please", "describe", "every", "shape", "and", "colour", "that", "you", "see", "here")
PERCENTILES = (50, 90, 99)


class Size(click.ParamType[tuple[int, int]]):
    """WIDTHxHEIGHT in pixels."""

    name = "WIDTHxHEIGHT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        try:
            width, height = (int(side) for side in str(value).lower().split("x"))
        except ValueError:
            self.fail(f"{value!r} is no size such as 448x448.", param, ctx)
        if not (1 <= width <= 8192 and 1 <= height <= 8192):
            self.fail(f"{value!r}: sides are 1 to 8192 pixels.", param, ctx)
        return width, height


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What each chat of a measurement holds: no two have the same picture or words, so that no cache helps."""

    images: int
    size: tuple[int, int]
    words: int
    tokens: int
    seed: int

    def request(self, index: int) -> dict[str, Any]:
        rng = random.Random(f"{self.seed} {index}")  # noqa: S311 - numbers that can be had again, not secret ones
        parts: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": _image(rng, self.size)}} for _ in range(self.images)
        ]
        text = " ".join([str(index), *rng.choices(WORDS, k=self.words)])
        content = [*parts, {"type": "text", "text": text}]
        return {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self.tokens,
            "temperature": 0,
            "ignore_eos": True,
        }


@dataclass(kw_only=True)
class Measurement:
    """What was measured.

    Attributes:
        answers: those that came whole.
        faults: what became of the others.
        seconds: from the first request to the last answer.
    """

    answers: list[Completion] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def rates(self) -> dict[str, float]:
        """Counts and totals per second."""
        usages = [answer.usage for answer in self.answers if answer.usage]
        return {
            "completed": len(self.answers),
            "failed": len(self.faults),
            "seconds": self.seconds,
            "requests_per_second": len(self.answers) / self.seconds,
            "output_tokens_per_second": sum(answer.tokens for answer in self.answers) / self.seconds,
            "prompt_tokens_per_second": sum(usage.prompt_tokens for usage in usages) / self.seconds,
        }

    def times(self) -> dict[str, dict[str, float]]:
        """Milliseconds, as mean and percentiles: until the first token (TTFT), per further token (TPOT), between
        pieces of a stream (ITL), and for the whole answer."""
        values: dict[str, Sequence[float | None]] = {
            "ttft_ms": [answer.seconds_to_first for answer in self.answers],
            "tpot_ms": [answer.seconds_per_token for answer in self.answers],
            "itl_ms": [gap for answer in self.answers for gap in answer.gaps],
            "latency_ms": [answer.last - answer.started for answer in self.answers if answer.last is not None],
        }
        return {name: summary([value for value in found if value is not None]) for name, found in values.items()}

    def as_json(self) -> dict[str, Any]:
        return {**self.rates(), **self.times(), "errors": sorted(set(self.faults))}


def _count(*names: str, least: int, most: int | None = None, default: int, says: str) -> Callable[[Command], Command]:
    return click.option(
        *names, default=default, show_default=True, type=click.IntRange(least, most), metavar="INT", help=says
    )


@click.command(cls=ConfiguredCommand)
@_count("-n", "--requests", least=1, default=32, says="Chats to measure.")
@_count("--concurrency", least=1, most=4096, default=8, says="Chats at once.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), metavar="NUMBER",
              help="Chats that begin per second, at random moments (Poisson); all at once by default.")  # fmt: skip
@_count("--pictures", least=0, most=32, default=1, says="Pictures per chat.")
@click.option("--size", default="448x448", show_default=True, type=Size(), metavar=Size.name,
              help="Pixels of a picture.")  # fmt: skip
@_count("--words", least=0, most=100_000, default=16, says="Words per question.")
@_count("--max-tokens", least=1, default=64, says="Tokens per answer.")
@_count("--warmup", least=0, default=2, says="Chats before the first that is measured.")
@click.option(
    "--seed", default=0, show_default=True, metavar="INT", help="Another seed makes other pictures and words."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@engine_options
def bench(
    *,
    requests: int,
    concurrency: int,
    rate: float | None,
    images: int,
    size: tuple[int, int],
    words: int,
    max_tokens: int,
    warmup: int,
    seed: int,
    as_json: bool,
    source: EngineSource,
) -> None:
    """Measure how fast a server or a model answers.

    Each chat has pictures and words of its own, so that caches do not help, and an answer of exactly --max-tokens
    where the server knows `ignore_eos`. Exits with 1 if a chat failed.
    """
    shape = Shape(images=images, size=size, words=words, tokens=max_tokens, seed=seed)
    chats = [shape.request(index) for index in range(-warmup, requests)]
    with source.open() as engine:
        asyncio.run(measure(engine, chats[:warmup], concurrency=concurrency))
        found = asyncio.run(measure(engine, chats[warmup:], concurrency=concurrency, rate=rate, show=True))
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
    else:
        _show(found)
    sys.exit(1 if found.faults else 0)


async def measure(
    engine: AnyEngine,
    chats: Sequence[dict[str, Any]],
    *,
    concurrency: int,
    rate: float | None = None,
    show: bool = False,
) -> Measurement:
    """Ask all of them, at most `concurrency` at once, each at its time where there is a rate (per second)."""
    from .concurrency import progress, run_concurrently

    found = Measurement()
    start = time.perf_counter()
    rng = random.Random(len(chats))  # noqa: S311 - as above
    due, beginnings = start, []
    for _ in chats:
        beginnings.append(due)
        due += rng.expovariate(rate) if rate else 0.0
    with progress(len(chats) if show else 0, unit="chat") as tick:

        async def work(item: tuple[float, dict[str, Any]]) -> None:
            await asyncio.sleep(max(0.0, item[0] - time.perf_counter()))
            await _one(engine, item[1], found)
            tick()

        await run_concurrently(zip(beginnings, chats, strict=True), work, at_once=concurrency)
    found.seconds = time.perf_counter() - start
    return found


async def _one(engine: AnyEngine, chat: dict[str, Any], found: Measurement) -> None:
    answer = Completion(started=time.perf_counter())
    request = {**chat, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with contextlib.aclosing(engine.astream(request)) as chunks:
            async for chunk in chunks:
                answer.take(chunk, time.perf_counter())
    except DashInferVLMError as error:
        found.faults.append(error.message)
    else:
        found.answers.append(answer)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles (nearest rank) of seconds, in milliseconds; nothing of nothing."""
    if not values:
        return {}
    ordered = sorted(value * 1000 for value in values)
    ranks = {f"p{percent}": ordered[-(-percent * len(ordered) // 100) - 1] for percent in PERCENTILES}
    return {"mean": sum(ordered) / len(ordered), **ranks}


def _show(found: Measurement) -> None:
    show_table(
        ("What", "Value"),
        [
            (name.replace("_", " "), f"{value:,}" if isinstance(value, int) else f"{value:,.2f}")
            for name, value in found.rates().items()
        ],
    )
    click.echo()
    rows = [
        (name.removesuffix("_ms").upper() + " (ms)", *(f"{value:,.1f}" for value in values.values()))
        for name, values in found.times().items()
        if values
    ]
    show_table(("Time", "Mean", *(f"p{percent}" for percent in PERCENTILES)), rows)
    for fault in sorted(set(found.faults)):
        click.echo(f"\nfailed: {fault}")


def _image(rng: random.Random, size: tuple[int, int]) -> str:
    """Coarse noise of a size, as JPEG in a data URL: no two alike, and small to send."""
    from PIL import Image as PILImage

    tile = PILImage.frombytes("RGB", (16, 16), rng.randbytes(16 * 16 * 3))
    buffer = io.BytesIO()
    tile.resize(size, PILImage.Resampling.BILINEAR).save(buffer, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
