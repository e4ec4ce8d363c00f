"""Finding, making and describing DashInfer's environment."""

from __future__ import annotations

import ctypes
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dashinfer_vlm_core.cli import cli
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.dashinfer import DashInferFactory
from dashinfer_vlm_core.dashinfer.environment import Environment, examine, find_environment, locked
from dashinfer_vlm_core.dashinfer.install import STUBS, install, make_stubs, suits
from dashinfer_vlm_core.errors import MissingDependency
from dashinfer_vlm_core.plugins import add_commands
from dashinfer_vlm_core.qwen2_vl.config import read_spec

needs_3_11 = pytest.mark.skipif(sys.version_info[:2] == (3, 10), reason="this interpreter may serve DashInfer itself")


def run(*arguments):
    add_commands(cli)
    return CliRunner().invoke(cli, ["dashinfer", *map(str, arguments)], catch_exceptions=True)


@needs_3_11
def test_status_says_that_nothing_is_installed_and_what_to_do(tmp_path):
    result = run("status", "--cache-dir", tmp_path)
    assert result.exit_code == 1
    assert "DashInfer is not installed. Run `dashinfer-vlm dashinfer install`" in result.output


@needs_3_11
def test_without_an_environment_the_decoder_cannot_run_and_says_why(tmp_path, tiny_checkpoint):
    fitness = DashInferFactory().fitness(read_spec(tiny_checkpoint), EngineConfig(cache_dir=tmp_path))
    assert fitness.score == 0
    assert "dashinfer install" in fitness.reason


@needs_3_11
def test_another_python_is_refused(tmp_path):
    result = run("install", "--python", sys.executable, "--cache-dir", tmp_path)
    assert result.exit_code == 1
    assert isinstance(result.exception, MissingDependency)
    assert f"{sys.executable} is no CPython 3.10" in result.exception.message
    assert not suits(Path(sys.executable))
    assert not suits(tmp_path / "python3.10")


def test_an_interpreter_that_is_named_has_to_be_there(tmp_path):
    with pytest.raises(MissingDependency, match="is no file") as error:
        find_environment(EngineConfig(dashinfer_python=tmp_path / "python"))
    assert error.value.param == "dashinfer_python"


def test_an_interpreter_without_dashinfer_says_what_it_lacks():
    findings = examine(Environment(python=Path(sys.executable), origin="", stubs=None))
    assert findings.python.startswith(f"{sys.version_info.major}.")
    assert findings.problem
    assert not findings.version


@pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="there is no C compiler")
def test_stand_ins_are_compiled_once_and_load(tmp_path):
    lines = []
    make_stubs(tmp_path, lines.append)
    make_stubs(tmp_path, lines.append)
    assert len(lines) == 1
    library = ctypes.CDLL(str(tmp_path / "libnvidia-ml.so.1"))
    library.nvmlErrorString.restype = ctypes.c_char_p
    assert library.nvmlInit_v2() != 0
    assert library.nvmlErrorString(9) == b"no GPU driver"
    assert set(STUBS) == {path.name for path in tmp_path.iterdir()}


def test_a_lock_is_waited_for(tmp_path):
    with locked(tmp_path / "lock") as first:
        assert not first
    with locked(tmp_path / "lock") as second:
        assert not second


@pytest.mark.dashinfer
def test_installing_again_finds_it_installed(environment):
    lines = []
    findings = install(EngineConfig(), python=None, cpu=environment.stubs is not None, tell=lines.append)
    assert findings.version.startswith("2.1.0")
    assert lines == [f"DashInfer {findings.version} is installed already."]


@pytest.mark.dashinfer
def test_status_says_what_is_there(environment):
    result = run("status")
    assert result.exit_code == 0, result.output
    assert "DashInfer:   2.1.0" in result.output
    assert str(environment.python) in result.output
    assert "It loads, on the CPU" in result.output


@pytest.mark.dashinfer
def test_auto_takes_dashinfer_on_cuda_alone(cache, oracle, tiny_checkpoint):
    fitness = DashInferFactory().fitness
    on_cpu = fitness(read_spec(oracle.folder), EngineConfig(cache_dir=cache, device="cpu"))
    assert on_cpu.score == 1
    assert "CPU:0" in on_cpu.reason
    narrow = fitness(read_spec(tiny_checkpoint), EngineConfig(cache_dir=cache, device="cpu"))
    assert (narrow.score, "heads of 64 or 128" in narrow.reason) == (0, True)
