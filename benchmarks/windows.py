"""The time of requests about a recording that share frames with an earlier one, relative to that of a new clip.

    python -m benchmarks.windows [--model qwen3.5-0.8b] [--frames 32] [--side 224] [--rounds 5]
        [--engines ours,vllm,llama-bf16] [any option of dashinfer-vlm serve]

A new clip; then the same clip and two frames more; then windows of its length that begin 2 and 8 frames later. The
frames are new in each round, and the question follows them. The lower bound is the ratio of the floating-point
operations of the pairs of frames and of the tokens that were not cached.

`--engines` sends the same requests to servers, and prints a second table: each engine's times relative to its own new
clip. vLLM takes videos; other engines take the frames as images.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.cli.command import EngineCommand
from dashinfer_vlm_core.engine.observers import RequestObserver, Stage

from .documents import ENGINES
from .engines import end_with_us
from .environments import OTHER_ENGINES_FOLDER, OtherEngines
from .limits import load_spec, prefill_flop, vision_flop
from .models import CACHE, checkpoint
from .stages import Clock
from .turns import Turn, ask
from .window_engines import HEADER, NEW, WINDOWS, Load, Window, compare, frame_list, questions

LOGS = Path(__file__).parent / "results" / "logs"
PAIR = 2
"""Frames that are encoded together."""


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


async def run_round(engine: Engine, clock: Clock, source: random.Random, frames: int, side: int) -> dict[str, Timing]:
    """Return the timings of a new clip and of all windows, with new frames."""
    timings = {}
    for question in questions(source, frames, side):
        content = [*frame_list(question.urls), question.text]
        turn = await ask(engine, [{"role": "user", "content": content}])
        timings[question.name] = Timing(clock.seconds["vision"][-1], turn)
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


def _engine_names(_context: click.Context, _param: click.Parameter, value: str) -> list[str]:
    names = [name for name in value.split(",") if name]
    if unknown := [name for name in names if name not in ENGINES]:
        raise click.BadParameter(f"unknown: {', '.join(unknown)}; choose from {', '.join(ENGINES)}")
    return names


def _even(_context: click.Context, _param: click.Parameter, value: int) -> int:
    if value % PAIR:
        raise click.BadParameter("must be even")
    return value


@click.command(cls=EngineCommand, help=__doc__)
@click.option("--frames", type=click.IntRange(2), default=32, show_default=True, callback=_even, help="Per clip; even.")
@click.option("--side", default=224, show_default=True, help="Width and height of a frame.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--models", type=click.Path(path_type=Path), default=CACHE, help="Folder of created models.")
@click.option("--engines", default="", callback=_engine_names, help=f"Servers to compare: {', '.join(ENGINES)}.")
@click.option("--other-engines", type=click.Path(path_type=Path), default=OTHER_ENGINES_FOLDER, help="Their folder.")
@click.option("--logs", type=click.Path(path_type=Path), default=LOGS, help="Folder for the output of servers.")
def main(
    *,
    frames: int,
    side: int,
    rounds: int,
    models: Path,
    engines: list[str],
    other_engines: Path,
    logs: Path,
    config: EngineConfig,
) -> None:
    model = checkpoint(config.model, models)
    config = config.model_copy(update={"model": str(model)})
    timings = asyncio.run(measure(config, rounds, frames, side))
    shares = [each[NEW].vision / each[NEW].turn.seconds for each in timings]
    print(
        f"{model.name}, {frames} frames of {side} x {side}: the encoder has {statistics.median(shares):.2f} of the time"
    )
    print("| request | tokens computed | encoder, s | ratio | first token, s | ratio | lower bound |")
    print("|---|---|---|---|---|---|---|")
    for row in rows(model, timings, frames):
        print(row, flush=True)
    if engines:
        print("", *HEADER, sep="\n")
        with end_with_us():
            for row in compare(
                engines, config, OtherEngines(other_engines.expanduser()), logs, Load(rounds, frames, side)
            ):
                print(row, flush=True)


if __name__ == "__main__":
    main()
