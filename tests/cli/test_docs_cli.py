"""The page on the command line: its examples print what it says, and its tables are those of the code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dashinfer_vlm_cli.plugin import COMMANDS
from dashinfer_vlm_cli.repl import COMMANDS as SPOKEN
from tests.pages import ROOT, page_text
from tests.waiting import HANG

TEXT = page_text("cli.md")
CONSOLE = re.findall(r"^```console\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
FILES = ("requests.jsonl", "options.yaml")


def steps(block):
    """The commands of an example, each with what it prints."""
    return [
        (part.partition("\n")[0], part.partition("\n")[2]) for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    ]


@pytest.fixture
def shell(tmp_path, pictures):
    """Run a command as it stands there, among the files of the page; what it prints."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "pictures").symlink_to(pictures)
    for command, printed in (step for block in CONSOLE for step in steps(block)):
        if command.startswith("cat "):
            (tmp_path / command.split()[1]).write_text(printed)

    def shell(command):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "HF_HUB_CACHE": str(tmp_path / "hub")}
        ended = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=HANG,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    return shell


@pytest.mark.slow
@pytest.mark.parametrize("block", CONSOLE, ids=[steps(block)[0][0][:40] for block in CONSOLE])
def test_the_examples_print_what_the_page_says(shell, block):
    for command, printed in steps(block):
        assert shell(command) == printed or not printed


def test_the_files_of_the_page_are_shown():
    shown = {command.split()[1] for block in CONSOLE for command, _ in steps(block) if command.startswith("cat ")}
    assert shown == set(FILES)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_row_and_an_example(name):
    assert f"| `{name}` | {COMMANDS[name]} |" in TEXT
    assert re.search(rf"^\$ .*dashinfer-vlm {name}\b", TEXT, re.MULTILINE)


@pytest.mark.parametrize("name", SPOKEN)
def test_each_command_of_the_talk_has_a_row(name):
    command = SPOKEN[name]
    written = f"/{name} {command.takes}".rstrip().replace("|", "\\|")
    assert f"| `{written}` | {command.does} |" in TEXT


def test_the_page_is_where_the_tests_look():
    assert (ROOT / "docs" / "cli.md").is_file()
