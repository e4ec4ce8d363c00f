"""Write the checkpoint of a model that reads: `python -m training.reading.export RUN CHECKPOINT`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from training.export import Published, export
from training.reading import prompts
from training.reading.batches import LINE_GRIDS, PAGE_GRIDS
from training.reading.train import SIZES
from training.sizes import FACTOR
from training.train import PROGRESS

PUBLISHED = Published(
    architecture=SIZES,
    tokenizer=prompts.build(),
    min_pixels=min(rows * columns for rows, columns in LINE_GRIDS) * FACTOR**2,
    max_pixels=max(rows * columns for rows, columns in PAGE_GRIDS) * FACTOR**2,
    max_new_tokens=512,
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training.reading.export", description=__doc__)
    parser.add_argument("run", type=Path, help="folder that the training wrote")
    parser.add_argument("checkpoint", type=Path, help="folder for the checkpoint")
    options = parser.parse_args(arguments)
    learner = torch.load(options.run / PROGRESS, weights_only=True)["learner"]
    export(learner["average"] or learner["weights"], PUBLISHED, options.checkpoint)


if __name__ == "__main__":
    main()
