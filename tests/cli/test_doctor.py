"""`doctor`: what is installed, what is missing, and how to mend it."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from dashinfer_vlm_cli.checks import EXTRAS, NEEDED, all_findings
from dashinfer_vlm_core import hookimpl
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.decoders.dashinfer.environment import (
    disk_bytes,
    private_environment,
    private_folder,
    stand_ins_folder,
)
from dashinfer_vlm_core.hookspecs import Finding
from dashinfer_vlm_core.kernels.devices import cuda_devices
from dashinfer_vlm_core.plugins import Registry
from tests.cli.conftest import MAIN, process


def findings(ended):
    return {row["name"]: row for row in json.loads(ended.stdout)}


@pytest.mark.slow
def test_a_sound_installation(tmp_path):
    ended = process("doctor", "--deep", "--json", DASHINFER_VLM_CACHE_DIR=str(tmp_path))
    found = findings(ended)
    assert ended.returncode == 0, ended.stdout
    assert {"python", "dashinfer-vlm-adapters", "cpu", "cuda", "cache", "disk", "plugins", *NEEDED} <= set(found)
    assert {f"extra {extra}" for extra in EXTRAS} <= set(found)
    assert found["self test"]["detail"] == "the decoder torch sees: A red circle."
    assert found["dashinfer"]["status"] == "missing"
    assert "dashinfer-vlm dashinfer install" in found["dashinfer"]["fix"]
    assert found["cache"]["detail"] == str(tmp_path)
    assert [row["name"] for row in found.values() if row["status"] == "broken"] == []


@pytest.mark.slow
def test_a_missing_extra_costs_nothing_and_a_missing_library_everything():
    """As if they were not installed: their modules cannot be found, or not loaded."""
    program = (
        "import importlib.util as u, sys; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'av' else find(name, *a)\n"
        f"sys.modules['llguidance'] = None\n{MAIN}"
    )
    ended = process("doctor", "--json", program=program)
    found = findings(ended)
    assert ended.returncode == 1
    assert found["extra video"]["status"] == "missing"
    assert found["extra video"]["fix"] == "Run: pip install 'dashinfer-vlm-adapters[video]'"
    assert found["llguidance"]["status"] == "broken"
    assert found["llguidance"]["fix"].startswith("Run: pip install --force-reinstall 'llguidance")


@pytest.mark.slow
def test_without_torch_the_rest_is_still_looked_at():
    ended = process("doctor", "--json", program=f"import sys\nsys.modules['torch'] = None\n{MAIN}")
    found = findings(ended)
    assert ended.returncode == 1
    assert found["torch"]["status"] == "broken"
    assert (found["kernels"]["status"], found["kernels"]["detail"]) == ("unusable", "torch does not load")
    assert found["cpu"]["detail"]


@pytest.mark.slow
def test_what_the_environment_sets_wrongly_is_named(tmp_path):
    found = findings(process("doctor", "--json", DASHINFER_VLM_MAX_PIXELS="3"))
    assert found["options"]["status"] == "broken"
    assert "max_pixels" in found["options"]["detail"]


@pytest.mark.slow
@pytest.mark.skipif(cuda_devices() > 0, reason="There is a GPU here.")
def test_cuda_build_without_gpu_is_reported_with_the_command():
    """As if torch were another build: its metadata alone say so."""
    program = f"import torch\ntorch.version.cuda = '13.0'\n{MAIN}"
    ended = process("doctor", "--json", program=program, DASHINFER_VLM_CPU_KERNELS="torch")
    cuda = findings(ended)["cuda"]
    release = torch.__version__.partition("+")[0]
    assert cuda["status"] == "unusable"
    assert "is a build for CUDA 13.0" in cuda["detail"]
    assert cuda["fix"].startswith("Run: pip uninstall -y torch")
    assert f"pip install torch=={release} --index-url https://download.pytorch.org/whl/cpu" in cuda["fix"]
    assert ended.returncode == 0


def kernels_in_c(found):
    """Whether this machine could have them: else nothing is missing."""
    return not found["kernels"]["detail"].startswith("PyTorch's: this CPU")


@pytest.mark.slow
@pytest.mark.parametrize(("decoder", "code"), [("torch", 0), ("dashinfer", 1)])
def test_a_cache_that_cannot_be_written_costs_what_needs_it(tmp_path, decoder, code):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"
    ended = process("doctor", "--json", DASHINFER_VLM_CACHE_DIR=str(folder), DASHINFER_VLM_DECODER=decoder)
    found = findings(ended)
    assert ended.returncode == code
    assert found["cache"]["status"] == "unusable"
    assert found.get("dashinfer cache", {}).get("status") == ("broken" if decoder == "dashinfer" else None)
    assert "`export DASHINFER_VLM_CACHE_DIR=FOLDER`" in found["cache"]["fix"]
    if kernels_in_c(found):
        assert found["kernels"]["status"] == "slow"
        assert f"the cache {folder}/kernels cannot be made: Not a directory" in found["kernels"]["detail"]
        assert found["kernels"]["fix"].startswith("Choose another one by `cache_dir`")


@pytest.mark.slow
def test_without_a_compiler_the_kernels_are_slow_and_the_command_is_told(tmp_path):
    found = findings(process("doctor", "--json", PATH=str(tmp_path), DASHINFER_VLM_CACHE_DIR=str(tmp_path / "cache")))
    if kernels_in_c(found):
        assert found["kernels"]["status"] == "slow"
        assert found["kernels"]["detail"].endswith(": no C compiler was found")
        assert "`apt-get install gcc`" in found["kernels"]["fix"]
    assert found["cache"]["status"] == "ok"


@pytest.mark.slow
def test_kernels_that_are_not_asked_for_are_not_missed(tmp_path):
    environment = {"DASHINFER_VLM_CPU_KERNELS": "torch", "DASHINFER_VLM_CACHE_DIR": str(tmp_path / "cache")}
    found = findings(process("doctor", "--json", PATH=str(tmp_path), **environment))
    assert (found["kernels"]["status"], found["kernels"]["fix"]) == ("ok", "")


@pytest.mark.slow
def test_what_is_not_ok_comes_with_what_mends_it(tmp_path):
    (tmp_path / "file").write_text("")
    environment = {"PATH": str(tmp_path), "DASHINFER_VLM_CACHE_DIR": str(tmp_path / "file" / "cache")}
    for row in findings(process("doctor", "--json", **environment)).values():
        assert (row["status"] == "ok") == (row["fix"] == ""), row


@pytest.mark.slow
def test_a_decoder_that_is_asked_for_has_to_be_there(tmp_path):
    ended = process("doctor", "--json", DASHINFER_VLM_DECODER="dashinfer", DASHINFER_VLM_CACHE_DIR=str(tmp_path))
    assert findings(ended)["dashinfer"]["status"] == "broken"
    assert ended.returncode == 1


@pytest.mark.slow
def test_colours_are_for_terminals_alone(terminal):
    shown = terminal("doctor", COLUMNS="120").see("cuda")
    assert "\x1b[32m" in shown
    plain = terminal("doctor", COLUMNS="120", NO_COLOR="1").see("cuda")
    assert "\x1b[" not in plain
    assert "WHAT" in plain
    assert "\x1b[" not in process("doctor").stdout


def test_a_person_is_told_the_command_that_mends(run, tmp_path):
    result = run("doctor", DASHINFER_VLM_CACHE_DIR=str(tmp_path))
    assert result.exit_code == 0
    assert "WHAT" in result.stdout.splitlines()[0]
    assert "\ndashinfer: DashInfer is not installed. Run `dashinfer-vlm dashinfer install`" in result.stdout
    assert os.fspath(tmp_path) in result.stdout


@pytest.mark.skipif(sys.version_info[:2] == (3, 10), reason="this interpreter may have DashInfer itself")
def test_doctor_reports_kind_and_size_of_dashinfers_environment(run, tmp_path):
    """Of an interpreter that answers as one with DashInfer does."""
    folder = private_folder(EngineConfig(cache_dir=tmp_path))
    python = private_environment(folder).python
    stand_ins_folder(python).mkdir(parents=True)
    python.parent.mkdir()
    found = {"python": "3.10.13", "version": "2.1.0", "cpu_only": True}
    python.write_text(f"#!/bin/sh\necho '{json.dumps(found)}'\n")
    python.chmod(0o755)
    (folder / "environment.json").write_text("{}")
    rows = {
        row["name"]: row for row in json.loads(run("doctor", "--json", DASHINFER_VLM_CACHE_DIR=str(tmp_path)).stdout)
    }
    size = f"{disk_bytes(folder) / 1e9:.2f} GB"
    assert rows["dashinfer"]["detail"] == f"2.1.0 under Python 3.10.13, for the CPU only, {size}"


def test_plugins_have_checks_of_their_own(monkeypatch):
    def one(config):
        return [Finding(name="tower", status="ok", detail=config.model)]

    def broken(config):
        raise OSError("no such\nfile")

    registry = Registry()
    registry.add_plugin(SimpleNamespace(register_checks=hookimpl(lambda register: register("tower", one))), name="one")
    registry.add_plugin(SimpleNamespace(register_checks=hookimpl(lambda register: register("bad", broken))), name="two")
    monkeypatch.setattr("dashinfer_vlm_cli.checks.load_plugins", lambda: registry)
    found = {finding.name: finding for finding in all_findings(deep=False)}
    assert found["tower"].detail == "demo"
    assert (found["bad"].status, found["bad"].detail) == ("unusable", "its check failed: OSError: no such file")
