"""What the comparisons of engines have in common."""

from __future__ import annotations

import time


def say(what: str) -> None:
    """Print a message with the time of day."""
    print(f"{time.strftime('%H:%M:%S')}  {what}", flush=True)


def describe(error: Exception) -> str:
    """Return the end of an error's message, which has the cause, in one line."""
    return " ".join(str(error).split())[-400:]
