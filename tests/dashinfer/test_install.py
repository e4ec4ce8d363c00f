"""Finding, creating and describing DashInfer's environment."""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from dashinfer_vlm_core.cli.main import cli
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import ConfigError, MissingDependency
from dashinfer_vlm_core.findings import Finding
from dashinfer_vlm_core.kernels.devices import cuda_devices
from dashinfer_vlm_core.models.qwen2_vl.config import read_spec
from dashinfer_vlm_core.plugins import add_commands
from dashinfer_vlm_dashinfer import DashInferFactory
from dashinfer_vlm_dashinfer.checks import check
from dashinfer_vlm_dashinfer.environment import (
    Environment,
    disk_bytes,
    examine,
    find_environment,
    locked,
    private_environment,
    private_folder,
)
from dashinfer_vlm_dashinfer.install import (
    CPU_ONLY_PACKAGES,
    install,
    is_suitable,
    requirements,
)

needs_3_11 = pytest.mark.skipif(sys.version_info[:2] == (3, 10), reason="this interpreter may serve DashInfer itself")


def run(*arguments):
    add_commands(cli)
    return CliRunner().invoke(cli, ["dashinfer", *map(str, arguments)], catch_exceptions=True)


@needs_3_11
def test_status_reports_missing_installation_and_next_step(tmp_path):
    result = run("status", "--cache-dir", tmp_path)
    assert result.exit_code == 1
    assert "DashInfer is not installed. Run `dashinfer-vlm dashinfer install`" in result.output


@needs_3_11
def test_decoder_without_environment_reports_reason(tmp_path, oracles):
    spec = read_spec(oracles("64-untied").folder)
    for decoder, device, suggested in (("auto", "cpu", False), ("dashinfer", "cpu", True)):
        config = EngineConfig(cache_dir=tmp_path, decoder=decoder, device=device)
        support = DashInferFactory().check_support(spec, config)
        assert (support.score, support.is_expected) == (0, suggested)
        assert ("dashinfer install" in support.reason) == suggested


@needs_3_11
def test_other_python_version_is_rejected(tmp_path):
    result = run("install", "--python", sys.executable, "--cache-dir", tmp_path)
    assert result.exit_code == 1
    assert isinstance(result.exception, MissingDependency)
    assert f"{sys.executable} is not a CPython 3.10" in result.exception.message
    assert not is_suitable(Path(sys.executable))
    assert not is_suitable(tmp_path / "python3.10")


def test_configured_interpreter_must_exist(tmp_path):
    config = EngineConfig(dashinfer_python=tmp_path / "python")
    with pytest.raises(ConfigError, match="is not a file") as error:
        find_environment(config)
    assert error.value.param == "dashinfer_python"
    assert next(check(config)) == Finding(
        name="dashinfer", status="unusable", detail="cannot be used", fix=error.value.message
    )


def test_interpreter_without_dashinfer_reports_missing_module():
    findings = examine(Environment(python=Path(sys.executable), origin=""))
    assert findings.python.startswith(f"{sys.version_info.major}.")
    assert findings.problem
    assert not findings.version


def test_installation_waits_for_lock(tmp_path):
    waiting = threading.Event()

    def wait():
        with locked(tmp_path / "lock"):
            waiting.set()

    with locked(tmp_path / "lock"):
        thread = threading.Thread(target=wait)
        thread.start()
        assert not waiting.wait(0.1)
    thread.join()
    assert waiting.is_set()


def mark_cpu_only(environment):
    environment.stubs.mkdir()
    (environment.stubs / "libcudart.so.12").touch()


@needs_3_11
@pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="there is no C compiler")
def test_full_environment_without_driver_gets_stub_libraries(installed):
    config = installed(cpu_only=False)
    environment = find_environment(config)
    environment.python.write_text(
        f"""#!/bin/sh
        if [ -e '{environment.stubs}/libcuda.so.1' ]
        then echo '{{"python": "3.10.13", "version": "2.1.0"}}'
        else echo '{{"python": "3.10.13", "problem": "libcuda.so.1 is missing"}}'
        fi
        """
    )
    lines = []
    install(config, python=None, cpu=True, report=lines.append)
    expected = ["Compiling stub libraries for the GPU driver's libraries.", "DashInfer is already installed."]
    assert lines == expected
    assert {path.name for path in environment.stubs.iterdir()} == {"libcuda.so.1", "libnvidia-ml.so.1"}


@pytest.fixture
def installed(tmp_path):
    """Create an environment whose interpreter behaves like one with DashInfer."""

    def make(*, cpu_only):
        folder = private_folder(EngineConfig(cache_dir=tmp_path))
        environment = private_environment(folder)
        python = environment.python
        python.parent.mkdir(parents=True)
        findings = {"python": "3.10.13", "version": "2.1.0"}
        python.write_text(f"#!/bin/sh\necho '{json.dumps(findings)}'\n")
        python.chmod(0o755)
        (folder / "environment.json").write_text("{}")
        if cpu_only:
            mark_cpu_only(environment)
        return EngineConfig(cache_dir=tmp_path)

    return make


@needs_3_11
@pytest.mark.parametrize(("cpu_only", "kind"), [(False, f"full, {cuda_devices()} CUDA devices"), (True, "CPU only")])
def test_status_reports_installed_kind(installed, cpu_only, kind):
    environment = find_environment(config := installed(cpu_only=cpu_only))
    assert environment.cpu_only == cpu_only
    output = run("status", "--cache-dir", config.cache_dir).output
    assert f"2.1.0 under Python 3.10.13, {kind}" in output
    assert f", {disk_bytes(environment.folder) / 1e9:.2f} GB" in output


@needs_3_11
@pytest.mark.parametrize("cpu_only", [False, True])
@pytest.mark.parametrize("cpu", [False, True])
def test_working_environment_is_kept(installed, cpu_only, cpu):
    """A full one also with `--cpu`; a CPU-only one also without it, unless there is a GPU."""
    if cuda_devices() and cpu_only and not cpu:
        pytest.skip("There is a GPU, for which the full environment would be installed.")
    lines = []
    install(installed(cpu_only=cpu_only), python=None, cpu=cpu, report=lines.append)
    assert lines == [f"DashInfer is already installed{', for the CPU only' if cpu_only else ''}."]


@needs_3_11
def test_decoder_rejects_cuda_in_cpu_only_environment(installed, oracles):
    config = installed(cpu_only=True).model_copy(update={"device": "cuda"})
    check_support = DashInferFactory().check_support(read_spec(oracles("64-untied").folder), config)
    assert check_support.score == 0
    assert "is installed for the CPU only: run `dashinfer-vlm dashinfer install`" in check_support.reason


def test_configured_cpu_only_interpreter_is_recognized(tmp_path):
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    environment = find_environment(EngineConfig(dashinfer_python=python))
    assert not environment.cpu_only
    mark_cpu_only(environment)
    assert environment.cpu_only


def test_packages_are_listed_with_exact_versions_and_hashes():
    lines = [line for line in requirements().splitlines() if not line.startswith("#")]
    chosen = requirements(CPU_ONLY_PACKAGES).splitlines()
    assert all(re.fullmatch(r"[\w.-]+==\S+( --hash=sha256:[0-9a-f]{64})+", line) for line in lines)
    assert [line.partition("==")[0] for line in chosen] == sorted(CPU_ONLY_PACKAGES)
    assert set(chosen) < set(lines)


@pytest.mark.dashinfer
def test_second_installation_is_a_no_op(environment):
    lines = []
    install(EngineConfig(), python=None, cpu=environment.stubs.exists(), report=lines.append)
    kind = ", for the CPU only" if environment.cpu_only else ""
    assert lines == [f"DashInfer is already installed{kind}."]


@pytest.mark.dashinfer
def test_status_lists_installed_versions(environment):
    result = run("status")
    assert result.exit_code == 0, result.output
    kind = "CPU only" if environment.cpu_only else "full"
    assert re.match(rf"DashInfer: 2\.1\.0/.* under Python 3\.10\.\d+, {kind}.*, \d+\.\d\d GB, ", result.output)
    assert result.output.endswith(f"{environment.python}\n")


@pytest.mark.dashinfer
def test_auto_selects_dashinfer_only_on_cuda(cache, oracle, tiny_checkpoint):
    check_support = DashInferFactory().check_support
    on_cpu = check_support(read_spec(oracle.folder), EngineConfig(cache_dir=cache, device="cpu"))
    assert on_cpu.score == 1
    assert "CPU:0" in on_cpu.reason
    narrow = check_support(read_spec(tiny_checkpoint), EngineConfig(cache_dir=cache, device="cpu"))
    assert (narrow.score, "head size of 64 or 128" in narrow.reason) == (0, True)
