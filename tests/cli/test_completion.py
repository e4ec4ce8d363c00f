"""Shell completion, as shells ask for it."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from dashinfer_vlm_cli.completion import HINTS
from tests.cli.conftest import process


@pytest.mark.parametrize("shell", HINTS)
def test_the_script_names_the_program_and_how_to_keep_it(run, shell):
    result = run("completion", shell)
    assert f"_DASHINFER_VLM_COMPLETE={shell}_complete" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("# To have it in every shell")


def test_the_bash_script_is_one(run, tmp_path):
    (tmp_path / "script").write_text(run("completion", "bash").stdout)
    subprocess.run([shutil.which("bash"), "-n", tmp_path / "script"], check=True)


def test_other_shells_are_refused(run):
    assert run("completion", "tcsh").exit_code == 2


def offered(line):
    """What is offered behind a line that was typed."""
    words = line.split(" ")
    ended = process(
        _DASHINFER_VLM_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1),
        program="import sys; sys.argv[0] = 'dashinfer-vlm'; from dashinfer_vlm_core.cli.main import main; main()",
    )  # fmt: skip
    assert ended.returncode in {0, 1}, ended.stderr
    return {item.split(",", 1)[1] for item in ended.stdout.splitlines()}


@pytest.mark.slow
def test_commands_flags_models_and_words_are_offered():
    assert {"batch", "bench"} <= offered("dashinfer-vlm b")
    assert "--max-pixels" in offered("dashinfer-vlm chat --max-p")
    assert "--max-pixels" in offered("dashinfer-vlm serve --max-p")
    assert offered("dashinfer-vlm chat --model de") == {"demo"}
    assert offered("dashinfer-vlm serve --dtype b") == {"bfloat16"}
