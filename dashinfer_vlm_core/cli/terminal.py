"""Terminal output: text without control characters, and tables; colored if the terminal supports it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import TextIO

import click

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_COLORS = {
    "ok": "green",
    "missing": "yellow",
    "unusable": "yellow",
    "slow": "yellow",
    "broken": "red",
    "duplicate": "yellow",
    "disabled": "yellow",
}
"""Of the cells with a status."""


def has_colors(stream: TextIO | None = None) -> bool:
    """Return whether a stream, or else standard output, is a terminal with colors; see https://no-color.org."""
    is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") in {"dumb", "unknown"}
    return (stream or sys.stdout).isatty() and not is_plain


def printable(text: str) -> str:
    """Remove control characters other than newlines and tabs: generated text must not control the terminal."""
    return _UNPRINTABLE.sub("", text)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 token` or `2 tokens`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def show_note(text: str) -> None:
    """Print a note about the output, dim if the terminal supports it."""
    click.secho(printable(text), dim=True, color=has_colors())


def show_reasoning(text: str) -> None:
    """Print a part of a model's reasoning on standard error if that is a terminal, dim if it supports it."""
    if sys.stderr.isatty():
        click.secho(printable(text), nl=False, err=True, dim=True, color=has_colors(sys.stderr))


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table as columns of text."""
    cells = [[column.upper() for column in columns], *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        click.echo("  ".join(map(colored, row, widths)).rstrip(), color=has_colors())


def colored(cell: str, width: int = 0) -> str:
    """Return a cell of a table; one with a status in its color."""
    text = cell.ljust(width)
    return click.style(text, fg=_COLORS[cell]) if cell in _COLORS else text
