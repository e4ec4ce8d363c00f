"""docs/cli.md: its examples print the documented output, and its tables match the code."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dashinfer_vlm_cli.plugin import COMMANDS
from dashinfer_vlm_cli.repl import COMMANDS as REPL_COMMANDS
from tests.cases import cases
from tests.forked import forked
from tests.pages import page_text
from tests.waiting import HANG

TEXT = page_text("cli.md")
CONSOLE = re.findall(r"^```console\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
FILES = ("requests.jsonl", "options.yaml")
RUN_ELSEWHERE = tuple(
    f"dashinfer-vlm {name}" for name in ("verify", "tune", "doctor", "pull", "quantize", "divergence")
)
"""Commands that take long or need a hub, and run in test_verification.py, test_tune.py, test_doctor.py, test_pull.py
and test_quantize.py."""


def steps(block):
    """Return the commands of an example, each with its output."""
    return [
        (part.partition("\n")[0], part.partition("\n")[2]) for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    ]


@pytest.fixture
def shell(tmp_path, images):
    """Run a command of the page in a folder with its files, and return the output."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "pictures").symlink_to(images)
    for command, printed in (step for block in CONSOLE for step in steps(block)):
        if command.startswith("cat "):
            (tmp_path / command.split()[1]).write_text(printed)

    scripts = Path(sys.executable).parent
    script = tmp_path / "bin" / "dashinfer-vlm"
    script.parent.mkdir()
    program = shlex.join([*forked(), str(scripts / "dashinfer-vlm")])
    script.write_text(f'#!/bin/sh\nexec {program} "$@"\n')
    script.chmod(0o755)

    def shell(command):
        path = f"{script.parent}:{scripts}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "HF_HUB_CACHE": str(tmp_path / "hub")}
        result = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=HANG,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return shell


@pytest.mark.slow
@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=command[:40])
        for block in CONSOLE
        if not (command := steps(block)[0][0]).startswith(RUN_ELSEWHERE)
    ],
)
def test_example_prints_documented_output(shell, block):
    for command, printed in steps(block):
        assert shell(command) == printed or not printed


def test_example_files_are_shown_on_page():
    shown = {command.split()[1] for block in CONSOLE for command, _ in steps(block) if command.startswith("cat ")}
    assert shown == set(FILES)


@cases("name", COMMANDS)
def test_command_has_row_and_example(name):
    assert f"| `{name}` | {COMMANDS[name]} |" in TEXT
    assert re.search(rf"^\$ .*dashinfer-vlm {name}\b", TEXT, re.MULTILINE)


@cases("name", REPL_COMMANDS)
def test_repl_command_has_row(name):
    command = REPL_COMMANDS[name]
    written = f"/{name} {command.arguments}".rstrip().replace("|", "\\|")
    assert f"| `{written}` | {command.summary} |" in TEXT
