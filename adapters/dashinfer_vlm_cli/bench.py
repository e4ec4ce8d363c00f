"""`dashinfer-vlm bench`: the speed of an engine for requests of a given size."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from dashinfer_vlm_core.cli.command import EngineCommand
from dashinfer_vlm_core.cli.terminal import show_table
from dashinfer_vlm_core.errors import DashInferVLMError

from .completion_stats import Completion, acomplete
from .engines import Command, EngineSource, engine_source_options

if TYPE_CHECKING:
    from .engines import AnyEngine

WORDS = ("please", "describe", "every", "shape", "and", "colour", "that", "you", "see", "here")
"""Words of the demo model's vocabulary, which has the British spelling of "color": each is one token."""
PERCENTILES = (50, 90, 99)
MAX_SIDE = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The requests of a measurement. Each has different images and words, so that caches do not help."""

    images: int
    size: tuple[int, int]
    words: int
    tokens: int
    seed: int

    def request(self, index: int) -> dict[str, Any]:
        rng = random.Random(f"{self.seed} {index}")  # noqa: S311 - reproducible, not secret
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
    """The results of a measurement.

    Attributes:
        completions: the completed requests.
        errors: the error messages of the failed ones.
        seconds: the time from the first request to the last response.
    """

    completions: list[Completion] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def rates(self) -> dict[str, float]:
        """Return counts, and totals per second."""
        usages = [completion.usage for completion in self.completions if completion.usage]
        return {
            "completed": len(self.completions),
            "failed": len(self.errors),
            "seconds": self.seconds,
            "requests_per_second": len(self.completions) / self.seconds,
            "output_tokens_per_second": sum(completion.tokens for completion in self.completions) / self.seconds,
            "prompt_tokens_per_second": sum(usage.prompt_tokens for usage in usages) / self.seconds,
        }

    def times(self) -> dict[str, dict[str, float]]:
        """Return mean and percentiles in milliseconds.

        TTFT is the time to the first token, TPOT the time per output token after the first, ITL the time between two
        chunks of a stream, and latency the time to the complete response.
        """
        values: dict[str, Sequence[float | None]] = {
            "ttft_ms": [completion.seconds_to_first_token for completion in self.completions],
            "tpot_ms": [completion.seconds_per_token for completion in self.completions],
            "itl_ms": [
                after - before
                for completion in self.completions
                for before, after in itertools.pairwise(completion.chunk_times)
            ],
            "latency_ms": [completion.seconds_to_last_token for completion in self.completions],
        }
        return {name: summary([value for value in times if value is not None]) for name, times in values.items()}

    def as_json(self) -> dict[str, Any]:
        return {**self.rates(), **self.times(), "errors": sorted(set(self.errors))}


def _parse_size(_: click.Context, param: click.Parameter, value: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d{0,3})[xX]([1-9]\d{0,3})", value)
    if not match or max(map(int, match.groups())) > MAX_SIDE:
        message = f"{value!r} is not a size. Write WIDTHxHEIGHT, such as 448x448, of at most {MAX_SIDE} pixels each."
        raise click.BadParameter(message, param=param)
    return int(match[1]), int(match[2])


def _count(
    *names: str, minimum: int, maximum: int | None = None, default: int, text: str
) -> Callable[[Command], Command]:
    kind = click.IntRange(minimum, maximum)
    return click.option(*names, default=default, show_default=True, type=kind, metavar="INT", help=text)


@click.command(cls=EngineCommand)
@_count("-n", "--requests", minimum=1, default=32, text="Number of requests to measure.")
@_count("--concurrency", minimum=1, maximum=4096, default=8, text="Maximum number of concurrent requests.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), metavar="NUMBER",
              help="Mean number of requests sent per second, at the random times of a Poisson process. By default, each"
              " is sent as soon as --concurrency allows.")  # fmt: skip
@_count("--images", minimum=0, maximum=32, default=1, text="Images per request.")
@click.option("--size", default="448x448", show_default=True, callback=_parse_size, metavar="WIDTHxHEIGHT",
              help="Image size in pixels.")  # fmt: skip
@_count("--words", minimum=0, maximum=100_000, default=16, text="Words per prompt.")
@_count("--max-tokens", minimum=1, default=64, text="Tokens per response.")
@_count("--warmup", minimum=0, default=2, text="Requests before the measurement.")
@click.option("--seed", default=0, show_default=True, metavar="INT", help="Seed of the random images and words.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@engine_source_options
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
    """Measure the speed of a server or a model.

    Each request has different images and words, so that caches do not help. Responses have exactly --max-tokens tokens
    if the server supports `ignore_eos`. Exits with 1 if a request failed.
    """
    workload = Workload(images=images, size=size, words=words, tokens=max_tokens, seed=seed)
    bodies = [workload.request(index) for index in range(-warmup, requests)]
    with source.open() as engine:
        asyncio.run(measure(engine, bodies[:warmup], concurrency=concurrency, show="Warm-up"))
        result = asyncio.run(measure(engine, bodies[warmup:], concurrency=concurrency, rate=rate, show="Requests"))
    if as_json:
        click.echo(json.dumps(result.as_json(), indent=2))
    else:
        _show(result)
    sys.exit(1 if result.errors else 0)


async def measure(
    engine: AnyEngine,
    chats: Sequence[dict[str, Any]],
    *,
    concurrency: int,
    rate: float | None = None,
    show: str = "",
) -> Measurement:
    """Send the requests, at most `concurrency` at a time. With a `rate` per second, they start at random times.

    With `show`, a progress bar has this description.
    """
    from dashinfer_vlm_core.concurrency.tasks import run_concurrently
    from dashinfer_vlm_core.progress import Progress

    result = Measurement()
    rng = random.Random(len(chats))  # noqa: S311 - as above
    start = time.perf_counter()
    pauses = [rng.expovariate(rate) if rate else 0.0 for _ in chats[1:]]
    start_times = itertools.accumulate(pauses, initial=start)
    with Progress(total=len(chats), desc=show, unit="", disable=not show) as progress:

        async def work(item: tuple[float, dict[str, Any]]) -> None:
            start_time, chat = item
            await asyncio.sleep(max(0.0, start_time - time.perf_counter()))
            try:
                result.completions.append(await acomplete(engine, chat))
            except DashInferVLMError as error:
                result.errors.append(error.message)
            progress.update()

        await run_concurrently(zip(start_times, chats, strict=False), work, max_concurrency=concurrency)
    result.seconds = time.perf_counter() - start
    return result


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return mean and percentiles (nearest rank) in milliseconds of values in seconds; {} if there are none."""
    if not values:
        return {}
    ordered = sorted(value * 1000 for value in values)
    ranks = {f"p{percent}": ordered[-(-percent * len(ordered) // 100) - 1] for percent in PERCENTILES}
    return {"mean": sum(ordered) / len(ordered), **ranks}


def _show(result: Measurement) -> None:
    show_table(
        ("Metric", "Value"),
        [
            (name.replace("_", " "), f"{value:,}" if isinstance(value, int) else f"{value:,.2f}")
            for name, value in result.rates().items()
        ],
    )
    click.echo()
    rows = [
        (name.removesuffix("_ms").upper() + " (ms)", *(f"{value:,.1f}" for value in values.values()))
        for name, values in result.times().items()
        if values
    ]
    show_table(("Time", "Mean", *(f"p{percent}" for percent in PERCENTILES)), rows)
    for message in sorted(set(result.errors)):
        click.echo(f"\nfailed: {message}")


def _image(rng: random.Random, size: tuple[int, int]) -> str:
    # Coarse noise is unique and small.
    from PIL import Image as PILImage

    tile = PILImage.frombytes("RGB", (16, 16), rng.randbytes(16 * 16 * 3))
    buffer = io.BytesIO()
    tile.resize(size, PILImage.Resampling.BILINEAR).save(buffer, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
