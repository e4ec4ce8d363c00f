"""The time of requests about a recording that share frames with an earlier one, relative to that of a new clip.

    python -m benchmarks.windows [--model qwen3.5-0.8b] [--frames 32] [--side 224] [--rounds 5]
        [any option of dashinfer-vlm serve]

A new clip; then the same clip and two frames more; then windows of its length that begin 2 and 8 frames later. The
frames are new in each round, and the question follows them. The lower bound is the ratio of the floating-point
operations of the pairs of frames and of the tokens that were not cached.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.cli.command import EngineCommand
from dashinfer_vlm_core.engine.observers import RequestObserver, Stage

from .limits import load_spec, prefill_flop, vision_flop
from .models import CACHE, checkpoint
from .stages import Clock
from .turns import Messages, Turn, ask
from .workloads import jpeg, question_part

PAIR = 2
"""Frames that are encoded together."""


@dataclass(frozen=True, slots=True)
class Window:
    """Frames of a recording.

    Attributes:
        name: the name of its row.
        start: the first of the frames.
        extra: number of the frames after those of the new clip.
        new: number of the frames that no earlier request had.
    """

    name: str
    start: int
    extra: int
    new: int


NEW = "new clip"
WINDOWS = (
    Window("2 frames appended", 0, 2, 2),
    Window("moved by 2 frames", 2 + 2, 2 + 2, 2),
    Window("moved by 8 frames", 4 + 8, 4 + 8, 8),
)
"""In this order: each has frames that the ones before it do not have."""

RECORDED = max(window.extra for window in WINDOWS)
"""Frames of a recording after those of the clip."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The seconds in the vision encoder, and what the client sees."""

    vision: float
    turn: Turn


class StageClock(RequestObserver):
    """Measures the stages of requests."""

    def __init__(self) -> None:
        self.clock = Clock()

    def stage(self, stage: Stage) -> contextlib.AbstractContextManager[object]:
        return self.clock.time(stage)


def request(source: random.Random, urls: Sequence[str]) -> Messages:
    video: dict[str, Any] = {"type": "video_url", "video_url": {"url": list(urls), "align": True}}
    return [{"role": "user", "content": [video, question_part(source)]}]


def frame_url(source: random.Random, side: int) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(jpeg(source, side)).decode()


async def run_round(engine: Engine, clock: Clock, source: random.Random, frames: int, side: int) -> dict[str, Timing]:
    """Return the timings of a new clip and of all windows, with new frames."""
    urls = [frame_url(source, side) for _ in range(frames + RECORDED)]
    timings = {}
    for window in (Window(NEW, 0, 0, frames), *WINDOWS):
        turn = await ask(engine, request(source, urls[window.start : frames + window.extra]))
        timings[window.name] = Timing(clock.seconds["vision"][-1], turn)
    return timings


async def measure(config: EngineConfig, rounds: int, frames: int, side: int) -> list[dict[str, Timing]]:
    source = random.Random("windows")
    observer = StageClock()
    with Engine(config) as engine:
        engine.add_observer(observer)
        await run_round(engine, observer.clock, source, frames, side)  # warms up lazily loaded parts
        return [await run_round(engine, observer.clock, source, frames, side) for _ in range(rounds)]


def flop(model: Path, turn: Turn, pairs: int, patches: int) -> float:
    """Return the operations of a request that encodes a number of pairs of frames of `patches` patches."""
    text = load_spec(model).text
    computed = prefill_flop(text, turn.tokens) - prefill_flop(text, turn.cached) + prefill_flop(text, 0)
    return computed + pairs * vision_flop(model, patches)


def rows(model: Path, rounds: Sequence[Mapping[str, Timing]], frames: int) -> Iterator[str]:
    """Yield a row for each request: medians over the rounds, and of the first token the range of its ratios."""
    spec = load_spec(model)
    patches = rounds[0][NEW].turn.video_tokens * spec.pixels.merge_size**2 * PAIR // frames
    whole = flop(model, rounds[0][NEW].turn, frames // PAIR, patches)
    for window in (Window(NEW, 0, 0, frames), *WINDOWS):
        timings = [each[window.name] for each in rounds]
        encoder = [timing.vision / each[NEW].vision for timing, each in zip(timings, rounds, strict=True)]
        first = [timing.turn.seconds / each[NEW].turn.seconds for timing, each in zip(timings, rounds, strict=True)]
        turn = timings[0].turn
        cells = (
            window.name,
            f"{turn.tokens - turn.cached} of {turn.tokens}",
            f"{statistics.median(timing.vision for timing in timings):.3f}",
            f"{statistics.median(encoder):.3f}",
            f"{statistics.median(timing.turn.seconds for timing in timings):.3f}",
            f"{statistics.median(first):.3f} ({min(first):.3f} to {max(first):.3f})",
            f"{flop(model, turn, window.new // PAIR, patches) / whole:.3f}",
        )
        yield f"| {' | '.join(cells)} |"


@click.command(cls=EngineCommand, help=__doc__)
@click.option("--frames", default=32, show_default=True, help="Frames of a clip, an even number.")
@click.option("--side", default=224, show_default=True, help="Width and height of a frame.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--models", type=click.Path(path_type=Path), default=CACHE, help="Folder of created models.")
def main(*, frames: int, side: int, rounds: int, models: Path, config: EngineConfig) -> None:
    model = checkpoint(config.model, models)
    timings = asyncio.run(measure(config.model_copy(update={"model": str(model)}), rounds, frames, side))
    shares = [each[NEW].vision / each[NEW].turn.seconds for each in timings]
    print(
        f"{model.name}, {frames} frames of {side} x {side}: the encoder has {statistics.median(shares):.2f} of the time"
    )
    print("| request | tokens computed | encoder, s | ratio | first token, s | ratio | lower bound |")
    print("|---|---|---|---|---|---|---|")
    for row in rows(model, timings, frames):
        print(row)


if __name__ == "__main__":
    main()
