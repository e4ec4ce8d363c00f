"""The programs in docs/langchain.md print the documented output, and the examples run."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.pages import ROOT, check_programs, page_programs
from tests.waiting import HANG

IMAGES = "examples/pictures"


@pytest.mark.slow
def test_documented_programs_print_documented_output(monkeypatch):
    monkeypatch.chdir(ROOT)
    check_programs("langchain.md")
    assert len(page_programs("langchain.md")) == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "arguments", "expected"),
    [
        ("describe.py", [f"{IMAGES}/circle.png"], "A red circle."),
        ("describe.py", [f"{IMAGES}/moving.mp4", "Which way does the circle move?"], "It moves to the right."),
        ("chain.py", [f"{IMAGES}/stone.png", "triangle"], "The triangle is cyan."),
        (
            "compare.py",
            [f"{IMAGES}/circle.png", f"{IMAGES}/pair.png", "Which picture has the star?"],
            "A red circle.\nA yellow star to the left of a purple square.\nThe second picture.",
        ),
        ("extract.py", [f"{IMAGES}/circle.png"], r'{"shape":"\w+","color":"\w+","count":[123]}'),
        (
            "agent.py",
            [IMAGES, "What is in circle.png?"],
            r"human: .*\nai: .*circle\.png.*\ntool: A red circle\.\nai: I looked: there is a circle\.",
        ),
    ],
)
def test_example_prints_expected_output(program, arguments, expected):
    command = [sys.executable, f"examples/langchain/{program}", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=False)
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(expected, result.stdout.strip())
