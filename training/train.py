"""Train the demo model: `python -m training.train --out DIR` from scratch, or from a checkpoint with another `--plan`.

The schedule counts steps, and the scenes of a step depend only on (seed, step, batch index): a run that is stopped and
resumed ends with the same weights as an uninterrupted one, regardless of the speed of the machine. Processes share the
batches of a step; their number affects only the order of summation.
"""

from __future__ import annotations

import argparse
import functools
import random
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

from training import batches as making
from training import compose, figures, labels, out_of_scope, published, questions
from training.learner import MEMORY, Learner, Tally
from training.network import Architecture, Batch
from training.user_scenes import Extremes

PROGRESS = "progress.pt"
"""File in the output folder from which a run is resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A training stage. The rate rises for `warmup` steps and falls in the last share `cooldown` of the steps."""

    name: str
    steps: int
    rate: float
    warmup: int = 0
    cooldown: float = 0.0
    final: float = 0.02
    """Final learning rate, as a share of `rate`."""
    batches: int
    """Batches per step."""
    mix: making.Mix = field(default_factory=making.Mix)
    pointing: float = 0.0
    """Weight of the loss for attending to the object of the question."""
    sight_only: bool = False
    text_only: bool = False
    """The vision encoder stays as it is. No auxiliary labels are learned: their outputs are not in a checkpoint."""

    @property
    def trained(self) -> tuple[str, ...]:
        """Prefixes of the names of the weights that are trained."""
        if self.sight_only:
            return ("visual.", "heads.cells.")
        return ("model.",) if self.text_only else ("",)

    def rate_at(self, step: int) -> float:
        rise = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        left = (self.steps - step) / self.steps
        fall = min(1.0, left / self.cooldown) if self.cooldown else 1.0
        return self.rate * rise * (self.final + (1 - self.final) * fall)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that the result of training depends on."""

    name: str
    stages: tuple[Stage, ...]
    sizes: Architecture = field(default_factory=Architecture)
    seed: int = 0
    rows: int = making.ROWS
    sights: int = 32
    """Images per batch in a stage that trains only the vision encoder."""
    memory: float = MEMORY
    """Decay of the running average of the weights."""
    start: Path | None = None
    """The checkpoint to start from; None initializes the weights at random."""
    dtype: torch.dtype = torch.bfloat16
    """The type of activations and gradients; weights are updated in fp32."""
    cells: tuple[int, ...] = labels.CELLS
    places: tuple[int, ...] = labels.PLACES
    """Number of values of the auxiliary labels of vision tokens, in the vision encoder and in the text model."""

    @property
    def identity(self) -> dict[str, str]:
        """What a run has in common with the earlier one that it resumes."""
        return {"plan": self.name, "start": str(self.start and self.start.resolve())}

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def make_batch(self, stage: Stage, step: int, number: int) -> Batch:
        """Create one batch of a step; `step` counts from the start of the run."""
        rng = random.Random(f"train {self.seed} {step} {number}")
        if stage.sight_only:
            return making.sight_batch(rng, self.sights)
        if stage.mix.tools and rng.random() < stage.mix.tools:
            return making.tool_batch(rng, stage.mix)
        return making.batch(rng, self.rows, stage.mix)


# Finding an object by its color or shape is learned late: long after everything about a single object is known, the
# model still chooses one of several objects at random. These questions are therefore the most frequent until then.
FIND = making.Mix(
    images=14, sets=2.5, videos=2.5, text=0.5,
    more={questions.color: 5, questions.shape: 5, questions.exists: 1.5, questions.count: 0.5},
)  # fmt: skip
LEARN = making.Mix(
    images=10, sets=6, videos=4, text=0.6,
    more={questions.describe: 1.4, questions.count: 1.4, questions.absent: 1.8, questions.outside: 0.6},
)  # fmt: skip
# The remaining errors are about the shapes of several objects, so these questions are the most frequent ones.
SETTLE = making.Mix(
    images=11, sets=5.5, videos=4, text=0.5,
    more={
        questions.describe: 1.7, questions.count: 1.7, questions.side: 1.3, questions.absent: 1.8,
        questions.exists: 1.2, questions.outside: 0.5,
    },
)  # fmt: skip
PLAN = Plan(
    name="scratch",
    stages=(
        Stage(name="see", steps=2600, rate=1.5e-3, warmup=100, cooldown=0.3, final=0.4, batches=2, sight_only=True),
        Stage(name="start", steps=500, rate=1.0e-3, warmup=150, batches=2, pointing=0.3),
        Stage(name="find", steps=1000, rate=1.0e-3, batches=2, mix=FIND, pointing=0.3),
        Stage(name="learn", steps=2600, rate=1.0e-3, batches=2, mix=LEARN, pointing=0.2),
        Stage(name="settle", steps=3400, rate=1.0e-3, cooldown=1.0, batches=2, mix=SETTLE, pointing=0.2),
    ),
)

# Three fifths of the questions are those of SETTLE, so that nothing is forgotten.
WIDEN = replace(SETTLE, text=3, also=out_of_scope.GENERATORS, also_share=0.4, photos=0.12, tools=0.2)
RECOVER = replace(WIDEN, text=2, also_share=0.25, photos=0.08, tools=0.15)
_tuning = functools.partial(Stage, batches=1, mix=WIDEN, pointing=0.2, text_only=True)
TUNE = Plan(
    name="tune",
    stages=(
        _tuning(name="widen", steps=120, rate=5e-4, warmup=20),
        _tuning(name="close", steps=80, rate=5e-4, cooldown=1.0),
        _tuning(name="settle", steps=200, rate=3e-4, warmup=10, cooldown=1.0),
        _tuning(name="recover", steps=400, rate=2.5e-4, warmup=10, cooldown=1.0, mix=RECOVER),
    ),
    seed=1,
    memory=0.98,
)
"""Continue from a checkpoint, with prompts about what the model does not know and with tools."""

# Half of the single images are as users draw them; images of 6 x 6 tokens, to which a square upload is resized, are
# frequent. Everything that was learned before is repeated.
DRAWN = replace(
    SETTLE, images=13, sets=5, videos=4, text=1.6, also=out_of_scope.GENERATORS, also_share=0.2, photos=0.1, tools=0.1,
    drawn=0.5, unknown=0.18, grids=compose.IMAGE_GRIDS | {(6, 6): 12},
)  # fmt: skip
# After that, the errors are about very small and very large shapes, and about what the model does not know.
EXTREMES = replace(DRAWN, drawn=0.6, extremes=Extremes(0.65), unknown=0.26)
LIKENESS = replace(EXTREMES, extremes=Extremes(0.8), unknown=0.3, kinds=figures.LIKE_SHAPES)
SMALLNESS = replace(
    LIKENESS, extremes=Extremes(0.85, small=0.8),
    kinds=figures.LIKE_SHAPES | {"5 corners": 7, "6 corners": 8, "face": 5, "heart": 4, "bar chart": 4},
)  # fmt: skip
# Images as users draw them leave fewer other words for a description; half of those about photographs were declined.
WORDS = replace(SMALLNESS, extremes=Extremes(0.9, small=0.85), text=2.6, also_share=0.38, photos=0.16)
# Circles were no longer recognized, because polygons were so frequent, and images without shapes were not described.
BALANCE = replace(
    WORDS, extremes=Extremes(0.75, small=0.85), text=1.4, also_share=0.15, photos=0.14, unknown=0.17,
    kinds=figures.WEIGHTS | {"5 corners": 3, "6 corners": 2.5, "8 corners": 0, "ellipse": 0.5, "heart": 1},
)  # fmt: skip
# Circles of half the side and hexagons were still mistaken for each other, and new words for a description declined.
PHRASES = replace(
    BALANCE, extremes=Extremes(0.5, small=0.8), text=2.0, also_share=0.25, photos=0.17, unknown=0.2,
    kinds={**BALANCE.kinds, "6 corners": 5},
)  # fmt: skip
# Then most circles were recognized, but more hexagons were called circles.
CORNERS = replace(PHRASES, unknown=0.26, extremes=Extremes(0.6, small=0.8), kinds={**PHRASES.kinds, "6 corners": 14})
# Both need single shapes of half the side, which images with extremes leave out.
MIDDLE = replace(CORNERS, drawn=0.75, unknown=0.28, extremes=Extremes(0.4, small=0.7))
_drawing = functools.partial(Stage, batches=2, pointing=0.2)
DRAW = Plan(
    name="draw",
    stages=(
        _drawing(name="draw", steps=2250, rate=7e-4, warmup=200, cooldown=0.6, final=0.74, mix=DRAWN),
        _drawing(name="extremes", steps=1500, rate=5.2e-4, cooldown=1.0, final=0.67, mix=EXTREMES),
        _drawing(name="likeness", steps=1500, rate=4e-4, warmup=20, cooldown=1.0, final=0.58, mix=LIKENESS),
        _drawing(name="smallness", steps=2500, rate=3e-4, warmup=20, cooldown=1.0, final=0.3, mix=SMALLNESS),
        _drawing(name="words", steps=2400, rate=2e-4, warmup=20, cooldown=1.0, mix=WORDS),
        _drawing(name="balance", steps=1400, rate=1.5e-4, warmup=20, cooldown=1.0, mix=BALANCE),
        _drawing(name="phrases", steps=1800, rate=1.8e-4, warmup=20, cooldown=1.0, mix=PHRASES),
        _drawing(name="corners", steps=1200, rate=1.5e-4, warmup=20, cooldown=1.0, mix=CORNERS),
        _drawing(name="middle", steps=1500, rate=1.8e-4, warmup=20, cooldown=1.0, mix=MIDDLE),
    ),
    seed=2,
)
"""Continue from a checkpoint, the vision encoder included, with images as users draw them."""
PLANS = {plan.name: plan for plan in (PLAN, TUNE, DRAW)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """Options of a run that do not affect the result."""

    out: Path
    processes: int = 2
    stop_after: int | None = None
    """Stop after this many steps of the run, to simulate an interruption."""
    report_every: int = 50
    save_every: int = 250


def run(plan: Plan, conduct: Conduct) -> None:
    """Train; resumes an earlier run in the same folder.

    Raises:
        SystemExit: the earlier run had another plan, or started from another checkpoint.
    """
    conduct.out.mkdir(parents=True, exist_ok=True)
    _check_progress(plan, conduct.out)
    if conduct.processes == 1:
        _work(0, plan, conduct, 0)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(_work, (plan, conduct, port), conduct.processes)  # type: ignore[attr-defined,no-untyped-call]  # torch leaves it untyped


def _work(rank: int, plan: Plan, conduct: Conduct, port: int) -> None:
    # One thread per process: on a busy machine this is faster than threads that synchronize at every operation, and
    # sums are reproducible.
    torch.set_num_threads(1)
    if conduct.processes > 1:
        address = f"tcp://127.0.0.1:{port}"
        distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=conduct.processes)
    try:
        _train(rank, plan, conduct)
    finally:
        if conduct.processes > 1:
            distributed.destroy_process_group()


def _train(rank: int, plan: Plan, conduct: Conduct) -> None:
    learner = Learner(
        plan.sizes,
        plan.seed,
        averaging=rank == 0,
        memory=plan.memory,
        dtype=plan.dtype,
        cells=plan.cells,
        places=plan.places,
    )
    if plan.start:
        learner.set_weights(published.read(plan.start))
    done, first = _resume(learner, plan, conduct.out), 0
    end = min(conduct.stop_after or plan.steps, plan.steps)
    reporter = Reporter(end - done, conduct.report_every)
    for stage in plan.stages:
        for step in range(max(first, done), min(first + stage.steps, end)):
            if step == first and _begins(plan, stage):
                learner.begin(stage.trained)
            rate = stage.rate_at(step - first)
            learner.pointing = stage.pointing
            own = [plan.make_batch(stage, step, number) for number in range(rank, stage.batches, conduct.processes)]
            learner.learn(own, stage.batches, rate, reporter.tally)
            if rank == 0:
                reporter.tick(stage.name, step + 1, rate)
            if rank == 0 and ((step + 1) % conduct.save_every == 0 or step + 1 == end):
                _save(conduct.out / PROGRESS, {**plan.identity, "step": step + 1, "learner": learner.state()})
        first += stage.steps


def _check_progress(plan: Plan, out: Path) -> None:
    if (out / PROGRESS).exists():
        progress = torch.load(out / PROGRESS, weights_only=True, mmap=True)
        if any(progress.get(name) != value for name, value in plan.identity.items()):
            earlier = f"plan {progress.get('plan')}, start {progress.get('start')}"
            raise SystemExit(f"{out} has the progress of another run ({earlier}): pass another --out")


def _resume(learner: Learner, plan: Plan, out: Path) -> int:
    """Load the progress, if any, and return the number of completed steps."""
    if not (out / PROGRESS).exists():
        return 0
    progress = torch.load(out / PROGRESS, weights_only=True)
    step, first = int(progress["step"]), 0
    for stage in plan.stages:
        if first < step <= first + stage.steps:
            learner.begin(stage.trained)
        first += stage.steps
    learner.load(progress["learner"])
    return step


def _begins(plan: Plan, stage: Stage) -> bool:
    """Whether a stage trains other weights than the previous one."""
    index = plan.stages.index(stage)
    return index == 0 or plan.stages[index - 1].trained != stage.trained


def _save(path: Path, content: dict[str, Any]) -> None:
    """Write to a temporary file and rename it, so that an interruption does not damage the previous file."""
    torch.save(content, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


class Reporter:
    """Prints the progress of training."""

    def __init__(self, steps: int, every: int) -> None:
        self.steps, self.every, self.count = steps, every, 0
        self.tally, self.started, self.since = Tally(), time.monotonic(), time.monotonic()

    def tick(self, stage: str, step: int, rate: float) -> None:
        self.count += 1
        if self.count % self.every and self.count != self.steps:
            return
        now = time.monotonic()
        pace = (now - self.since) / max(self.tally.sums["steps"], 1)
        left = (self.steps - self.count) * (now - self.started) / self.count / 60
        print(
            f"{stage} step {step} rate {rate:.1e} loss {self.tally.mean('loss'):.3f} "
            f"answers {self.tally.mean('answers'):.4f} cells {self.tally.mean('cells'):.2f} "
            f"pointed {self.tally.mean('pointed'):.2f} "
            f"{pace:.2f} s/step, {(now - self.started) / 60:.1f} min done, {left:.0f} min left",
            flush=True,
        )
        if self.tally.asked:
            print("   " + " ".join(f"{task} {share:.2f}" for task, share in self.tally.exact().items()), flush=True)
        self.tally, self.since = Tally(), now


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the progress, from which a run is resumed")
    parser.add_argument("--processes", type=int, default=2, help="processes with one thread each; at most one per core")
    parser.add_argument("--plan", choices=PLANS, default="scratch", help="the schedule (default: %(default)s)")
    parser.add_argument("--start", type=Path, help="continue from this checkpoint")
    parser.add_argument(
        "--float32",
        action="store_true",
        help="compute in float32, which is three times as fast on processors without bfloat16 instructions",
    )
    options = parser.parse_args(arguments)
    if options.plan == "scratch" and options.start:
        parser.error("--start: the plan scratch starts at random; choose another one by --plan")
    if options.plan != "scratch" and not options.start:
        parser.error(f"--plan {options.plan} continues from a checkpoint: pass --start")
    plan = replace(PLANS[options.plan], start=options.start)
    plan = replace(plan, dtype=torch.float32) if options.float32 else plan
    run(plan, Conduct(out=options.out, processes=options.processes))


if __name__ == "__main__":
    main()
