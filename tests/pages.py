"""Documentation pages whose Python examples are run."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SERVER = "http://127.0.0.1:8000"


def read_page(page: Path) -> str:
    """Return the text of a file, given by its path in the repository."""
    return (ROOT / page).read_text(encoding="utf-8")


def page_text(page: str) -> str:
    """Return the text of a file under `docs`."""
    return read_page(Path("docs", page))


def page_programs(page: str) -> list[str]:
    """Return the Python examples of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```$", page_text(page), re.MULTILINE | re.DOTALL)


def check_programs(page: str, server: str = SERVER) -> None:
    """Run the examples of a page in order in one namespace; each must print what its `print` comments state.

    `server` replaces the address in the examples.
    """
    names: dict[str, object] = {}
    for program in page_programs(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(program.replace(SERVER, server), page, "exec", dont_inherit=True), names)
        assert printed.getvalue().splitlines() == re.findall(r"^\s*print\(.*\)  # (.*)$", program, re.MULTILINE)
