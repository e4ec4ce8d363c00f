"""Measure the seconds that each engine needs to read a page of a document on this machine.

    python -m benchmarks.documents [--models mineru2.5,qwen3.5-0.8b] [--engines ours,ours-int8,vllm] [--rounds 3]

A page is an A4 page at 150 dots per inch (1,240 x 1,754 pixels), sent as PNG and not scaled down, for which exactly 800
tokens are generated, without speculation. `--documents 2` has two users, who send four pages each, one after the other.
Only one engine is loaded at a time, so that its memory is measured; in each round, the engines run in random order. The
models have the shapes of published checkpoints and random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from .client import Sample, Talk, load
from .compare import IN_PROCESS, OPTIONAL_ENGINES, OTHER_ENGINES, OURS
from .engines import MAX_PIXELS, Launch, Server, other_engine, ours
from .environments import OtherEngines
from .models import checkpoint
from .rounds import add_options, reporting, run_round, say
from .workloads import words

WIDTH, HEIGHT = 1240, 1754
TOKENS = 800
PAGES = 4
"""Pages of each user of `--documents`."""
PROMPT = "Convert this page to Markdown."
ENGINES = tuple(name for name in (*OURS, *OTHER_ENGINES, *OPTIONAL_ENGINES) if name != IN_PROCESS)
DEFAULT = ("ours", "ours-int8", "ours-int4", "vllm", "llama-bf16", "llama-q8", "llama-q4")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What an engine needed for its pages.

    Attributes:
        seconds: from the first request to the last token.
        pages: number of pages.
        ttft: seconds to the first token of each page.
        tpot: seconds for each further token.
        prompt_tokens: tokens of a page's prompt, as the engine counts them.
        peak_bytes: peak resident memory of its processes.
    """

    seconds: float
    pages: int
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    prompt_tokens: int
    peak_bytes: int

    @property
    def seconds_per_page(self) -> float:
        return self.seconds / self.pages


@dataclass(kw_only=True)
class Table:
    """The readings by model and engine, and notes on engines."""

    readings: dict[tuple[str, str], list[Reading]] = field(default_factory=lambda: defaultdict(list))
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def lines(self) -> Iterator[str]:
        """Yield the rows of a Markdown table, with the medians of the rounds."""
        yield (
            "| model | engine | s per page | range | pages per hour | prompt, tokens | TTFT, s | ms per token "
            "| memory, GB |"
        )
        yield "|---|---|---|---|---|---|---|---|---|"
        for (model, engine), found in self.readings.items():
            seconds = sorted(reading.seconds_per_page for reading in found)
            middle = statistics.median(seconds)
            ttft = statistics.median(value for reading in found for value in reading.ttft)
            tpot = statistics.median(value for reading in found for value in reading.tpot)
            memory = max(reading.peak_bytes for reading in found) / 1e9
            yield (
                f"| {model} | {engine} | {middle:.1f} | {seconds[0]:.1f} to {seconds[-1]:.1f} | {3600 / middle:.0f} "
                f"| {found[0].prompt_tokens} | {ttft:.1f} | {1000 * tpot:.1f} | {memory:.2f} |"
            )
        yield from (f"* {note}" for note in self.notes)

    def raw(self) -> list[dict[str, Any]]:
        return [
            {"model": model, "engine": engine, **asdict(reading)}
            for (model, engine), readings in self.readings.items()
            for reading in readings
        ]


def main(arguments: Sequence[str] | None = None) -> Table:
    options = _parser().parse_args(arguments)
    models = {Path(name).name: checkpoint(name, options.model_folder) for name in options.models.split(",")}
    table = Table()
    with reporting(table, options.json):
        for model, folder in models.items():
            engines = options.engines
            for number in range(options.rounds):
                measure = partial(_measure, model=model, folder=folder, number=number, options=options, table=table)
                engines = list(run_round(model, number, engines, table.note, measure))
    return table


def page(source: random.Random, width: int = WIDTH, height: int = HEIGHT) -> bytes:
    """Return the PNG of a page of random words. Every page is new: no engine finds it in a cache."""
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    margin, line = width // 10, max(8, height // 60)
    for top in range(margin, height - margin, line):
        draw.text((margin, top), words(source, 24), fill="black", font_size=line * 0.6)
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def talks(seed: str, documents: int, *, tokens: int = TOKENS, size: tuple[int, int] = (WIDTH, HEIGHT)) -> list[Talk]:
    """Return the conversations of one page each: a single one, or `PAGES` of each document."""
    source = random.Random(seed)
    count = documents * PAGES if documents else 1
    return [Talk(turns=(_content(page(source, *size)),), tokens=tokens) for _ in range(count)]


def read(
    launch: Launch, log: Path, pages: Sequence[Talk], warm: Sequence[Talk], *, users: int, settle: float
) -> Reading:
    """Start an engine, let it read pages, and stop it.

    Args:
        launch: how to start it.
        log: file for its output.
        pages: the measured conversations.
        warm: conversations before them.
        users: number of pages that are read at the same time.
        settle: seconds after `warm`.

    Raises:
        RuntimeError: it does not start, or a response is not complete.
    """
    server = Server(launch, log)
    try:
        asyncio.run(_read(server, warm, users))
        time.sleep(settle)
        begin = time.perf_counter()
        samples = asyncio.run(_read(server, pages, users))
        seconds = time.perf_counter() - begin
        peak = server.peak_bytes()
    finally:
        server.stop()
    if faults := [sample.fault for sample in samples if sample.fault]:
        raise RuntimeError(f"{launch.name}: {faults[0]}")
    return Reading(
        seconds=seconds,
        pages=len(samples),
        ttft=tuple(sample.ttft for sample in samples),
        tpot=tuple(sample.tpot for sample in samples),
        prompt_tokens=samples[0].prompt_tokens,
        peak_bytes=peak,
    )


def _measure(name: str, *, model: str, folder: Path, number: int, options: argparse.Namespace, table: Table) -> None:
    size = (options.width, options.height)
    users = options.documents or 1
    launch = _launch(name, folder, OtherEngines(options.other_engines.expanduser()), size, users)
    if launch.note:
        table.note(f"{name}: {launch.note}")
    pages = talks(f"{model} {number}", options.documents, tokens=options.tokens, size=size)
    warm = talks(f"warm {model} {number}", 0, tokens=8, size=(size[0] // 4, size[1] // 4))
    reading = read(launch, options.logs / f"{model}-{name}.log", pages, warm, users=users, settle=options.settle)
    say(f"  {reading.seconds_per_page:.1f} s per page, {reading.prompt_tokens} tokens of a prompt")
    table.readings[model, name].append(reading)


def _launch(name: str, model: Path, other_engines: OtherEngines, size: tuple[int, int], users: int) -> Launch:
    max_pixels = max(size[0] * size[1], MAX_PIXELS)
    if name in OURS:
        options = ("--speculative-method", "none", "--max-pixels", str(max_pixels))
        return ours(name, str(model), *OURS[name], *options)
    return other_engine(name, model, other_engines, max_pixels=max_pixels, slots=users)


async def _read(server: Server, pages: Sequence[Talk], users: int) -> list[Sample]:
    async with server.target() as target:
        return await load(target, pages, users=users)


def _content(png: bytes) -> list[dict[str, Any]]:
    url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": PROMPT}]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, models="mineru2.5,qwen3.5-0.8b", engines=ENGINES, default=DEFAULT)
    parser.add_argument(
        "--documents", type=int, default=0, help=f"users with {PAGES} pages each; by default, one with one page"
    )
    parser.add_argument("--tokens", type=int, default=TOKENS, help="generated tokens of a page (%(default)s)")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--height", type=int, default=HEIGHT)
    return parser


if __name__ == "__main__":
    main()
