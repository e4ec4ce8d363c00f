"""Pages of the documentation whose programs are run."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SERVER = "http://127.0.0.1:8000"


def text_of(page: str) -> str:
    """A file under `docs`."""
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def programs_of(page: str) -> list[str]:
    """Its Python programs, in their order."""
    return re.findall(r"^```python\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)


def check_programs(page: str, server: str = SERVER) -> None:
    """Run them one after the other, in one namespace: each prints what the comments behind its `print`s say.

    `server` stands in for the address that the page names.
    """
    names: dict[str, object] = {}
    for program in programs_of(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(program.replace(SERVER, server), page, "exec", dont_inherit=True), names)
        assert printed.getvalue().splitlines() == re.findall(r"^\s*print\(.*\)  # (.*)$", program, re.MULTILINE)
