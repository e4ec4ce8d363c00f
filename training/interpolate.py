"""Interpolate the weights of two checkpoints: `python -m training.interpolate FROM TO --share 0.7 OUT`.

After further training, a share of less than one keeps more of what the earlier weights do better, as in WiSE-FT
(arXiv:2109.01903).
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def interpolate(start: Path, end: Path, share: float, out: Path) -> None:
    """Write the checkpoint `start` to the folder `out`, with weights between its own and those of `end`.

    Args:
        start: a checkpoint.
        end: a checkpoint with the same architecture.
        share: of `end`, from 0 to 1.
        out: a new folder.

    Raises:
        ValueError: the checkpoints have different tensors.
    """
    first, last = (load_file(folder / WEIGHTS) for folder in (start, end))
    if {name: x.shape for name, x in first.items()} != {name: x.shape for name, x in last.items()}:
        raise ValueError("The checkpoints have different tensors.")
    shutil.copytree(start, out, ignore=shutil.ignore_patterns(WEIGHTS))
    between = {name: ((1 - share) * x.float() + share * last[name].float()).to(x.dtype) for name, x in first.items()}
    save_file(between, out / WEIGHTS, metadata={"format": "pt"})
    (out / WEIGHTS).chmod(0o644)


def main(arguments: Sequence[str] | None = None) -> None:
    """Interpolate as the arguments, or the command line, ask."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("start", type=Path, metavar="FROM", help="a checkpoint")
    parser.add_argument("end", type=Path, metavar="TO", help="a checkpoint with the same architecture")
    parser.add_argument("--share", type=float, default=0.7, help="of TO, from 0 to 1 (default: 0.7)")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    options = parser.parse_args(arguments)
    interpolate(options.start, options.end, options.share, options.out)


if __name__ == "__main__":
    main()
