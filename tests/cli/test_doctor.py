"""`doctor`: the checks of an installation, and their fixes."""

from __future__ import annotations

import functools
import json
import os
import platform
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

from dashinfer_vlm_cli.checks import EXTRAS, REQUIRED, _embedding_store, _media_workers, _without_gpu, all_findings
from dashinfer_vlm_core import hookimpl
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.findings import Finding
from dashinfer_vlm_core.installation import install_step
from dashinfer_vlm_core.kernels.devices import cuda_devices
from dashinfer_vlm_core.media_workers import fork_server
from dashinfer_vlm_core.media_workers.sandbox import missing_restrictions
from dashinfer_vlm_core.media_workers.seccomp import has_list
from dashinfer_vlm_core.plugins import Registry
from dashinfer_vlm_cpu import native
from dashinfer_vlm_cpu.library import load_library
from dashinfer_vlm_dashinfer.environment import (
    disk_bytes,
    private_environment,
    private_folder,
)
from tests.cli.conftest import MAIN, run_process
from tests.quantized_checkpoints import LAYOUTS, write_config, write_quantized

pytestmark = pytest.mark.slow


def findings(result):
    return {row["name"]: row for row in json.loads(result.stdout)}


@pytest.mark.slow
def test_working_installation(tmp_path):
    result = run_process("doctor", "--deep", "--json", DASHINFER_VLM_CACHE_DIR=str(tmp_path))
    found = findings(result)
    assert result.returncode == 0, result.stdout
    assert {"python", "dashinfer-vlm-adapters", "cpu", "cuda", "cache", "disk", "plugins", *REQUIRED} <= set(found)
    assert {f"extra {extra}" for extra in EXTRAS} <= set(found)
    assert found["self test"]["detail"] == "response of the decoder torch: A red circle."
    assert found["cache"]["detail"] == str(tmp_path)
    assert found["media workers"]["status"] == ("unusable" if missing_restrictions() else "ok")
    assert "tuned kernels" not in found
    assert [row["name"] for row in found.values() if row["status"] == "broken"] == []


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_restrictions()) or not has_list(platform.machine()), reason="not restricted here")
def test_decoder_that_needs_other_system_calls_is_reported(monkeypatch):
    shorter = "from dashinfer_vlm_core.media_workers.system_calls import ALLOWED; ALLOWED.pop('mprotect');"
    monkeypatch.setattr(fork_server, "_PROGRAM", fork_server._PROGRAM.replace(" from", f" {shorter} from", 1))
    (row,) = _media_workers(EngineConfig())
    assert row.status == "slow"
    assert "cannot decode" in row.fix
    assert "h264.mp4 (pyav)" in row.fix


@pytest.mark.slow
def test_missing_extra_is_optional_and_missing_library_is_broken():
    """Simulate missing packages: their modules cannot be found, or cannot be imported."""
    program = (
        "import importlib.util as u, sys; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'av' else find(name, *a)\n"
        f"sys.modules['llguidance'] = None\n{MAIN}"
    )
    result = run_process("doctor", "--json", program=program, fork=False)
    found = findings(result)
    assert result.returncode == 1
    assert found["extra video"]["status"] == "missing"
    assert found["extra video"]["fix"] == install_step("video")
    assert found["llguidance"]["status"] == "broken"
    assert " -c constraints.txt --force-reinstall 'llguidance" in found["llguidance"]["fix"]


@pytest.mark.slow
def test_other_checks_run_without_torch():
    result = run_process("doctor", "--json", program=f"import sys\nsys.modules['torch'] = None\n{MAIN}", fork=False)
    found = findings(result)
    assert result.returncode == 1
    assert found["torch"]["status"] == "broken"
    assert (found["kernels"]["status"], found["kernels"]["detail"]) == ("unusable", "torch cannot be imported")
    assert found["cpu"]["detail"]


@pytest.mark.slow
def test_invalid_environment_variable_is_reported(run, tmp_path):
    found = findings(run("doctor", "--json", DASHINFER_VLM_MAX_PIXELS="3"))
    assert found["options"]["status"] == "broken"
    assert "max_pixels" in found["options"]["detail"]


@pytest.mark.slow
@pytest.mark.skipif(cuda_devices() > 0, reason="There is a GPU here.")
def test_cuda_build_without_gpu_is_reported_with_the_command():
    """Simulate a CUDA build of torch by its metadata."""
    program = f"import torch\ntorch.version.cuda = '13.0'\n{MAIN}"
    result = run_process("doctor", "--json", program=program, DASHINFER_VLM_CPU_KERNELS="torch")
    cuda = findings(result)["cuda"]
    release = torch.__version__.partition("+")[0]
    assert cuda["status"] == "unusable"
    assert "is a build for CUDA 13.0" in cuda["detail"]
    assert cuda["fix"].startswith("Run: pip uninstall -y torch")
    assert f"pip install torch=={release} " in cuda["fix"]
    assert "--index-url https://download.pytorch.org/whl/cpu" in cuda["fix"]
    assert result.returncode == 0


def test_torchvision_for_cuda_is_replaced_too(tmp_path, monkeypatch):
    metadata = tmp_path / "torchvision-0.30.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.30.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    fix = _without_gpu("2.15.0+cu132", "13.2").fix
    assert fix.startswith("Run: pip uninstall -y torch torchvision")
    assert "pip install torch==2.15.0 torchvision --index-url" in fix


def supports_c_kernels(found):
    """Return whether this machine supports the C kernels."""
    return not found["kernels"]["detail"].startswith("PyTorch's: this CPU")


@pytest.mark.slow
@pytest.mark.parametrize(("decoder", "code"), [("torch", 0), ("dashinfer", 1)])
def test_unwritable_cache_breaks_only_what_needs_it(run, tmp_path, decoder, code):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"
    result = run("doctor", "--json", DASHINFER_VLM_CACHE_DIR=str(folder), DASHINFER_VLM_DECODER=decoder)
    found = findings(result)
    assert result.exit_code == code
    assert found["cache"]["status"] == "unusable"
    assert found.get("dashinfer cache", {}).get("status") == ("broken" if decoder == "dashinfer" else None)
    assert "`export DASHINFER_VLM_CACHE_DIR=FOLDER`" in found["cache"]["fix"]


@pytest.mark.slow
def test_missing_kernels_are_reported_with_cost_and_command(run, tmp_path, monkeypatch):
    monkeypatch.setattr(native, "load_library", functools.partial(missing_library, tmp_path))
    native.load_variant.cache_clear()
    try:
        found = findings(run("doctor", "--json"))
    finally:
        native.load_variant.cache_clear()
    if supports_c_kernels(found):
        assert found["kernels"]["status"] == "slow"
        assert "1.5 to 2 times as long" in found["kernels"]["detail"]
        assert found["kernels"]["detail"].endswith(": the package was installed without a C compiler")
        assert found["kernels"]["fix"] == "Install gcc (11 or newer), and run `python -m dashinfer_vlm_cpu`."


def missing_library(folder, variant, path):
    return load_library(variant, folder / "none.so")


@pytest.mark.slow
def test_parts_that_are_turned_off_are_not_reported(run, tmp_path):
    environment = {
        "DASHINFER_VLM_CPU_KERNELS": "torch",
        "DASHINFER_VLM_MEDIA_WORKERS": "0",
        "DASHINFER_VLM_CACHE_DIR": str(tmp_path / "cache"),
    }
    found = findings(run("doctor", "--json", PATH=str(tmp_path), **environment))
    assert (found["kernels"]["status"], found["kernels"]["fix"]) == ("ok", "")
    assert found["media workers"]["status"] == "ok"
    assert found["media workers"]["detail"].startswith("off")


@pytest.mark.slow
def test_every_problem_has_a_fix(run, tmp_path):
    (tmp_path / "file").write_text("")
    environment = {"PATH": str(tmp_path), "DASHINFER_VLM_CACHE_DIR": str(tmp_path / "file" / "cache")}
    for row in findings(run("doctor", "--json", **environment)).values():
        assert (row["status"] == "ok") == (row["fix"] == ""), row


@pytest.mark.skipif(sys.version_info[:2] == (3, 10), reason="this interpreter may have DashInfer itself")
def test_dashinfer_is_suggested_on_a_gpu_only(run, tmp_path):
    found = findings(run("doctor", "--json", DASHINFER_VLM_CACHE_DIR=str(tmp_path)))["dashinfer"]
    assert found["detail"].startswith("not installed")
    if cuda_devices():
        assert "Run `dashinfer-vlm dashinfer install`" in found["fix"]
    else:
        assert (found["status"], found["fix"]) == ("ok", "")


@pytest.mark.slow
def test_configured_decoder_is_required(run, tmp_path):
    result = run("doctor", "--json", DASHINFER_VLM_DECODER="dashinfer", DASHINFER_VLM_CACHE_DIR=str(tmp_path))
    assert findings(result)["dashinfer"]["status"] == "broken"
    assert result.exit_code == 1


@pytest.mark.slow
def test_status_has_a_color_on_a_terminal(terminal):
    """Other terminals: test_colors_require_capable_terminal."""
    assert "\x1b[32m" in terminal("doctor", COLUMNS="120").wait_for("cuda")


def test_table_is_followed_by_fixes(run, tmp_path):
    result = run("doctor", DASHINFER_VLM_CACHE_DIR=str(tmp_path))
    assert result.exit_code == 0
    assert "CHECK" in result.stdout.splitlines()[0]
    assert "\x1b[" not in result.stdout
    assert os.fspath(tmp_path) in result.stdout


@pytest.mark.skipif(sys.version_info[:2] == (3, 10), reason="this interpreter may have DashInfer itself")
def test_doctor_reports_kind_and_size_of_dashinfers_environment(run, tmp_path):
    """Simulate an interpreter with DashInfer by a shell script."""
    folder = private_folder(EngineConfig(cache_dir=tmp_path))
    environment = private_environment(folder)
    environment.stubs.mkdir(parents=True)
    (environment.stubs / "libcudart.so.12").touch()
    python = environment.python
    python.parent.mkdir()
    found = {"python": "3.10.13", "version": "2.1.0"}
    python.write_text(f"#!/bin/sh\necho '{json.dumps(found)}'\n")
    python.chmod(0o755)
    (folder / "environment.json").write_text("{}")
    rows = {
        row["name"]: row for row in json.loads(run("doctor", "--json", DASHINFER_VLM_CACHE_DIR=str(tmp_path)).stdout)
    }
    size = f"{disk_bytes(folder) / 1e9:.2f} GB"
    assert rows["dashinfer"]["detail"] == f"2.1.0 under Python 3.10.13, CPU only, {size}, {python}"


def test_embedding_store_is_checked(tmp_path):
    def check(**options):
        return list(_embedding_store(EngineConfig(**options)))

    assert check() == []
    (found,) = check(embedding_store=(tmp_path / "store").as_uri())
    assert (found.status, found.detail) == ("ok", f"{tmp_path}/store: 0 embeddings, 0.0 of 4096 MiB")
    (found,) = check(embedding_store="redis://user:hunter2@127.0.0.1:1/0")
    assert found.status == "unusable"
    assert found.detail.startswith("redis://127.0.0.1:1/0: ConnectionError: ")
    assert "hunter2" not in found.detail + found.fix
    (found,) = check(embedding_store="s3://bucket")
    assert (found.status, found.detail) == ("broken", "s3://bucket")
    assert "must be a URL that begins with one of file://" in found.fix


def test_plugins_can_register_checks(monkeypatch):
    def working(config):
        return [Finding(name="tower", status="ok", detail=config.model)]

    def broken(config):
        raise OSError("no such\nfile")

    registry = Registry()
    registry.add_plugin(
        SimpleNamespace(register_checks=hookimpl(lambda register: register("tower", working))), name="one"
    )
    registry.add_plugin(SimpleNamespace(register_checks=hookimpl(lambda register: register("bad", broken))), name="two")
    monkeypatch.setattr("dashinfer_vlm_cli.checks.load_plugins", lambda: registry)
    found = {finding.name: finding for finding in all_findings(deep=False)}
    assert found["tower"].detail == "demo"
    assert (found["bad"].status, found["bad"].detail) == ("unusable", "the check failed: OSError: no such file")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [("awq", "bfloat16", "ok"), ("fp8-block", "float32", "slow")], ids=lambda case: case[0]
)
def test_memory_of_a_quantized_checkpoint_is_reported(run, tiny_checkpoint, tmp_path, case):
    layout, dtype, status = case
    model = write_quantized(tiny_checkpoint, tmp_path, LAYOUTS[layout]).quantized
    found = findings(run("doctor", "--json", DASHINFER_VLM_MODEL=str(model), DASHINFER_VLM_DTYPE=dtype))
    if not supports_c_kernels(found):
        status = "slow"
    assert found["weights"]["status"] == status
    if status == "ok":
        assert found["weights"]["detail"].startswith(f"{model}, awq: 14 matrices keep their stored bits, 0.0 MB")
    if layout == "fp8-block":
        assert "14 matrices are widened to float32, 0.2 MB instead of 0.1 MB" in found["weights"]["detail"]


@pytest.mark.slow
def test_unsupported_quantized_checkpoint_is_reported(run, tiny_checkpoint, tmp_path):
    shutil.copytree(tiny_checkpoint, tmp_path / "model")
    write_config(tmp_path / "model", quantization_config={"quant_method": "bitsandbytes"})
    found = findings(run("doctor", "--json", DASHINFER_VLM_MODEL=str(tmp_path / "model")))
    assert found["weights"]["status"] == "broken"
    assert "is 'bitsandbytes', which is not supported" in found["weights"]["fix"]
