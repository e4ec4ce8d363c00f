"""Shell completion through the environment variables that shells set."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from dashinfer_vlm_cli.completion import HINTS
from tests.cli.conftest import run_process


@pytest.mark.parametrize("shell", HINTS)
def test_script_contains_variable_and_installation_hint(run, shell):
    result = run("completion", shell)
    assert f"_DASHINFER_VLM_COMPLETE={shell}_complete" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("# To enable it permanently")


def test_bash_script_is_valid(run, tmp_path):
    (tmp_path / "script").write_text(run("completion", "bash").stdout)
    subprocess.run([shutil.which("bash"), "-n", tmp_path / "script"], check=True)


def test_unknown_shell_is_rejected(run):
    assert run("completion", "tcsh").exit_code == 2


def completions(line):
    """Return the completions of a command line."""
    words = line.split(" ")
    result = run_process(
        _DASHINFER_VLM_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1),
        program="import sys; sys.argv[0] = 'dashinfer-vlm'; from dashinfer_vlm_core.cli.main import main; main()",
    )  # fmt: skip
    assert result.returncode in {0, 1}, result.stderr
    return {item.split(",", 1)[1] for item in result.stdout.splitlines()}


@pytest.mark.slow
def test_completes_commands_options_models_and_choices():
    assert {"batch", "bench"} <= completions("dashinfer-vlm b")
    assert "--max-pixels" in completions("dashinfer-vlm chat --max-p")
    assert "--max-pixels" in completions("dashinfer-vlm serve --max-p")
    assert completions("dashinfer-vlm chat --model de") == {"demo"}
    assert completions("dashinfer-vlm serve de") == {"demo"}
    assert completions("dashinfer-vlm serve --dtype b") == {"bfloat16"}
