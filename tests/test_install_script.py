"""`scripts/test-install`, as far as it can be tested without an installation."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.scripts import load_script

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script():
    return load_script("test_install")


def test_missing_interpreter_is_skipped():
    done = subprocess.run([ROOT / "scripts" / "test-install", "9.9"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.strip().startswith("Python 9.9: not run: Python 9.9 was not found")


@pytest.mark.parametrize("reachable", [True, False])
def test_cpu_index_is_used_if_reachable(script, monkeypatch, reachable):
    monkeypatch.setattr(script, "_is_reachable", lambda url: reachable)
    *first, second = script._pip_lines(".")
    assert second == ["pip", "install", "-c", "constraints.txt", ".[server,video]"]
    assert [line[-2:] for line in first] == ([["https://download.pytorch.org/whl/cpu", "torch"]] if reachable else [])


def test_wheel_is_installed_instead_of_the_checkout(script, monkeypatch):
    monkeypatch.setattr(script, "_is_reachable", lambda url: False)
    line = ["pip", "install", "-c", "constraints.txt", "/dist/package.whl[server,video]"]
    assert script._pip_lines("/dist/package.whl") == [line]


@pytest.mark.parametrize("reachable", [True, False])
def test_uv_command_is_that_of_the_readme(script, monkeypatch, reachable):
    monkeypatch.setattr(script, "_is_reachable", lambda url: reachable)
    line = script._uv_line(Path("/python3"), "/dist/package.whl")
    backend = ["--torch-backend", "cpu"] if reachable else []
    start = [
        "uvx",
        "--python",
        "/python3",
        *backend,
        "-c",
        "constraints.txt",
        "--from",
        "/dist/package.whl[server,video]",
    ]
    assert line[: len(start) + 2] == [*start, "dashinfer-vlm", "run"]


def test_modules_exist(script):
    assert [module for module in script.MODULES.values() if not (ROOT / module).is_file()] == []


def test_failed_step_is_reported_with_output(script, capsys):
    with pytest.raises(script.StepFailed, match=r"install \(exit code 3"):
        script._step("install", ["bash", "-c", "echo no space left; exit 3"], {"PATH": "/usr/bin:/bin"})
    assert "no space left" in capsys.readouterr().out
