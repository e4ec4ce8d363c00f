"""The programs of docs/langchain.md print what the page says, and those of examples/langchain run."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/langchain.md").read_text(), re.MULTILINE | re.DOTALL)
PICTURES = "examples/pictures"


def test_the_programs_print_what_the_page_says(monkeypatch):
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    for program in PROGRAMS:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(program, "docs/langchain.md", "exec", dont_inherit=True), names)
        assert printed.getvalue().splitlines() == re.findall(r"^\s*print\(.*\)  # (.*)$", program, re.MULTILINE)
    assert len(PROGRAMS) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "arguments", "expected"),
    [
        ("describe.py", [f"{PICTURES}/circle.png"], "A red circle."),
        ("describe.py", [f"{PICTURES}/moving.mp4", "Which way does the circle move?"], "It moves to the right."),
        ("chain.py", [f"{PICTURES}/stone.png", "triangle"], "The triangle is cyan."),
        (
            "compare.py",
            [f"{PICTURES}/circle.png", f"{PICTURES}/pair.png", "Which picture has the star?"],
            "A red circle.\nA yellow star to the left of a purple square.\nThe second picture.",
        ),
        ("extract.py", [f"{PICTURES}/circle.png"], r'{"shape":"\w+","colour":"\w+","count":[123]}'),
        (
            "agent.py",
            [PICTURES, "What is in circle.png?"],
            r"human: .*\nai: .*circle\.png.*\ntool: A red circle\.\nai: I looked: there is a circle\.",
        ),
    ],
)
def test_the_examples_run(program, arguments, expected):
    command = [sys.executable, f"examples/langchain/{program}", *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stderr
    assert re.fullmatch(expected, ended.stdout.strip())
