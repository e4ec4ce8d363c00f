"""Terminal output: colored tables if rich is installed, plain text otherwise."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec

import click

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def is_rich() -> bool:
    """Return whether standard output is a terminal that supports colors, and rich is installed."""
    if not sys.stdout.isatty() or find_spec("rich") is None:
        return False
    from rich.console import Console

    console = Console()  # it checks NO_COLOR and the terminal's capabilities
    return not (console.no_color or console.is_dumb_terminal)


def printable(text: str) -> str:
    """Remove control characters other than newlines and tabs: generated text must not control the terminal."""
    return _UNPRINTABLE.sub("", text)


def show_note(text: str) -> None:
    """Print a note about the output, dim if the terminal supports it."""
    if is_rich():
        click.secho(printable(text), dim=True)
    else:
        click.echo(printable(text))


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with rich, or as columns of plain text."""
    if is_rich():
        _rich_table(columns, rows)
    else:
        click.echo("\n".join(_plain_table([tuple(column.upper() for column in columns), *rows])))


def _rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=box.SIMPLE_HEAD, header_style="bold")
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    Console().print(table)


_STYLES = {
    "ok": "green",
    "missing": "yellow",
    "unusable": "yellow",
    "slow": "yellow",
    "broken": "red",
    "duplicate": "yellow",
    "disabled": "yellow",
}


def _plain_table(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
