"""Train the model that reads: `python -m training.reading.train --out DIR`. A run is resumed as by `training.train`."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from training import train
from training.network import Architecture, Batch
from training.reading import batches, labels, prompts
from training.reading.batches import LINE_GRIDS, PAGE_GRIDS, PART_GRIDS, Pages

SIZES = Architecture(
    vocab_size=prompts.VOCABULARY, intermediate_size=512, embed_dim=160, depth=5, num_heads=5
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage(train.Stage):
    """A training stage on pages."""

    pages: Pages = field(default_factory=Pages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(train.Plan):
    """Everything that the result of training on pages depends on."""

    stages: tuple[Stage, ...]
    sizes: Architecture = SIZES
    cells: tuple[int, ...] = labels.CELLS
    places: tuple[int, ...] = labels.PLACES

    def make_batch(self, stage: train.Stage, step: int, number: int) -> Batch:
        assert isinstance(stage, Stage)
        rng = random.Random(f"read {self.seed} {step} {number}")
        if stage.sight_only:
            return batches.sight_batch(rng, stage.pages)
        return batches.batch(rng, stage.pages)


PARTS = Pages(grids={**LINE_GRIDS, **PART_GRIDS})
MANY = Pages(grids={**LINE_GRIDS, **PART_GRIDS, **PAGE_GRIDS}, totals=0.1, unreadable=0.06)
WHOLE = Pages(grids={**PART_GRIDS, **PAGE_GRIDS}, receipts=0.5, totals=0.12, unreadable=0.06)
PLAN = Plan(
    name="reading",
    stages=(
        Stage(name="see", steps=2200, rate=1.5e-3, warmup=100, cooldown=0.3, final=0.4, batches=2, sight_only=True),
        Stage(
            name="lines", steps=1500, rate=1e-3, warmup=150, batches=2, pages=Pages(grids=LINE_GRIDS), pointing=0.3
        ),
        Stage(name="parts", steps=1500, rate=1e-3, batches=2, pages=PARTS, pointing=0.3),
        Stage(name="pages", steps=2500, rate=8e-4, cooldown=0.5, final=0.4, batches=2, pages=MANY, pointing=0.2),
        Stage(name="settle", steps=1200, rate=3.2e-4, cooldown=1.0, batches=2, pages=WHOLE, pointing=0.1),
    ),
    seed=4,
)  # fmt: skip
SEVERAL_LINES = Pages(grids={**PART_GRIDS, **PAGE_GRIDS}, receipts=0.5, unreadable=0.04)
REFINE = Plan(
    name="refine",
    stages=(
        Stage(name="parts", steps=1000, rate=6e-4, warmup=150, batches=2, pages=PARTS, pointing=0.3),
        Stage(name="pages", steps=2000, rate=6e-4, batches=2, pages=SEVERAL_LINES, pointing=0.3),
        Stage(name="settle", steps=1200, rate=4e-4, cooldown=1.0, batches=2, pages=WHOLE, pointing=0.1),
    ),
    seed=5,
)  # fmt: skip
"""Continues from the checkpoint of `PLAN`, at a lower rate: most errors were skipped or repeated lines."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training.reading.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the progress, from which a run is resumed")
    parser.add_argument("--processes", type=int, default=2, help="processes with one thread each; at most one per core")
    parser.add_argument(
        "--float32",
        action="store_true",
        help="compute in float32, which is faster on processors without bfloat16 instructions",
    )
    parser.add_argument("--start", type=Path, help="continue from this checkpoint of the model that reads")
    options = parser.parse_args(arguments)
    plan = replace(REFINE, start=options.start) if options.start else PLAN
    plan = replace(plan, dtype=torch.float32) if options.float32 else plan
    train.run(plan, train.Conduct(out=options.out, processes=options.processes))


if __name__ == "__main__":
    main()
