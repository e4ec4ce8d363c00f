"""What the comparisons of engines have in common."""

from __future__ import annotations

import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection


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


def say(what: str) -> None:
    """Print a message with the time of day."""
    print(f"{time.strftime('%H:%M:%S')}  {what}", flush=True)


def describe(error: Exception) -> str:
    """Return the end of an error's message, which has the cause, in one line."""
    return " ".join(str(error).split())[-400:]
