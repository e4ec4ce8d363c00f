"""The programs of docs/langchain.md print what the page says, and those of examples/langchain run."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.pages import ROOT, check_programs, page_programs
from tests.waiting import HANG

PICTURES = "examples/pictures"


@pytest.mark.slow
def test_the_programs_print_what_the_page_says(monkeypatch):
    monkeypatch.chdir(ROOT)
    check_programs("langchain.md")
    assert len(page_programs("langchain.md")) == 4


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
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=False)
    assert ended.returncode == 0, ended.stderr
    assert re.fullmatch(expected, ended.stdout.strip())
