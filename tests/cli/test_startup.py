"""What the command line costs before it does anything."""

from __future__ import annotations

import pytest

from dashinfer_vlm_cli.plugin import COMMANDS
from tests.cli.conftest import process

HEAVY = ("torch", "transformers", "tokenizers", "openai", "huggingface_hub", "litellm", "fastapi", "av")

PROGRAM = f"""
import atexit, sys
atexit.register(lambda: print("LOADED", sorted(set(sys.modules) & set({HEAVY!r}))))
from dashinfer_vlm_core.cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), *((name,) for name in COMMANDS), ("serve",), ("plugins",)], ids=" ".join)
def test_help_imports_nothing_heavy(words):
    ended = process(*words, "--help", program=PROGRAM)
    assert ended.stdout.splitlines()[-1] == "LOADED []"
    assert "Usage: " in ended.stdout


def test_the_group_lists_each_command_with_what_it_does(run):
    text = run("--help").output
    for name, summary in COMMANDS.items():
        assert f"  {name}" in text
        assert summary[:40] in text


@pytest.mark.parametrize("name", COMMANDS)
def test_each_summary_is_the_first_line_of_the_help(run, name):
    assert COMMANDS[name].rstrip(".") in " ".join(run(name, "--help").output.split())
