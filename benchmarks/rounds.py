"""What the comparisons of engines have in common: their options, rounds and messages."""

from __future__ import annotations

import contextlib
import json
import random
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .engines import end_with_us
from .environments import OTHER_ENGINES_FOLDER
from .models import CACHE

Measured = TypeVar("Measured")


def names_of(known: Collection[str], *, optional: bool = False) -> Callable[[str], list[str]]:
    """Return the type of an option whose value is NAME,NAME, without repetitions; an empty one has to be `optional`."""

    def parse(value: str) -> list[str]:
        names = value.split(",") if value or not optional else []
        if unknown := [name for name in names if name not in known]:
            raise ArgumentTypeError(f"unknown: {', '.join(unknown)}; choose from {', '.join(known)}")
        if len(set(names)) < len(names):
            raise ArgumentTypeError("a name is repeated")
        return names

    return parse


def add_options(parser: ArgumentParser, *, models: str, engines: Collection[str], default: Sequence[str]) -> None:
    """Add the options of a comparison that loads one engine at a time."""
    parser.add_argument("--models", default=models, help="names or folders of models (%(default)s)")
    parser.add_argument(
        "--engines",
        type=names_of(engines),
        default=",".join(default),
        help=f"of {', '.join(engines)} (%(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=3)
    add_settle(parser)
    parser.add_argument("--model-folder", type=Path, default=CACHE, help="where models are created (%(default)s)")
    parser.add_argument("--other-engines", type=Path, default=OTHER_ENGINES_FOLDER, help="(%(default)s)")
    parser.add_argument("--logs", type=Path, default=Path(__file__).parent / "results" / "logs", help="(%(default)s)")
    parser.add_argument("--json", type=Path, help="file for the raw figures")


def add_settle(parser: ArgumentParser) -> None:
    """Add the option for how long an engine is idle before it is measured.

    Some finish in the background. This one moves weights to huge pages, which takes 2.5 seconds per GB where a virtual
    machine returns free memory to its host, and much longer next to requests, whose steps take longer until then.
    Checkpoints of more than 5 GB need more than the default.
    """
    parser.add_argument("--settle", type=float, default=15, help="idle seconds of a started engine (%(default)s)")


@contextlib.contextmanager
def reporting(table: Any, file: Path | None) -> Iterator[None]:
    """Print the `lines` of a table at the end, also after an interruption, and write its `raw` figures to a file."""
    try:
        with end_with_us():
            yield
    finally:
        print("\n".join(table.lines()))
        if file and (figures := table.raw()):
            file.write_text(json.dumps(figures, indent=1))


def run_round(
    model: str, number: int, names: Sequence[str], note: Callable[[str], None], measure: Callable[[str], Measured]
) -> dict[str, Measured]:
    """Measure engines in random order, and note those that fail."""
    found = {}
    for name in random.Random(f"order {number}").sample(names, len(names)):
        say(f"{model}, round {number + 1}: {name}")
        try:
            found[name] = measure(name)
        except RuntimeError as error:
            note(f"{model}, {name}: {describe(error)}")
    return found


def say(what: str) -> None:
    """Print a message with the time of day."""
    print(f"{time.strftime('%H:%M:%S')}  {what}", flush=True)


def describe(error: Exception) -> str:
    """Return the end of an error's message, which has the cause, in one line."""
    return " ".join(str(error).split())[-400:]
