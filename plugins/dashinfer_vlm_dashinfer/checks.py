"""The checks of DashInfer for `dashinfer-vlm doctor` and `dashinfer-vlm dashinfer status`."""

from __future__ import annotations

from collections.abc import Iterator

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.config.folders import CACHE_FIX, write_error
from dashinfer_vlm_core.errors import MissingDependency, SetupError
from dashinfer_vlm_core.findings import Finding, Status
from dashinfer_vlm_core.kernels.devices import cuda_devices

from .environment import Environment, disk_bytes, examine, find_environment


def check(config: EngineConfig) -> Iterator[Finding]:
    """Check that the environment exists and works, and that models can be converted."""
    finding = check_environment(config)
    if finding.status == "missing" and not cuda_devices():
        detail = "not installed; it is for GPUs, and exact for text only on a CPU"
        finding = Finding(name=finding.name, status="ok", detail=detail)
    yield finding
    if config.decoder == "dashinfer" and (error := write_error(config.cache_folder)):
        detail = f"{config.cache_folder}: {error}; DashInfer stores its environment and converted models there"
        yield Finding(name="dashinfer cache", status="broken", detail=detail, fix=CACHE_FIX)


def check_environment(config: EngineConfig) -> Finding:
    failed: Status | None = "broken" if config.decoder == "dashinfer" else None
    try:
        environment = find_environment(config)
    except MissingDependency as error:
        return Finding(name="dashinfer", status=failed or "missing", detail="not installed", fix=error.message)
    except SetupError as error:
        return Finding(name="dashinfer", status=failed or "unusable", detail="cannot be used", fix=error.message)
    findings = examine(environment)
    if findings.problem:
        fix = _fix(environment, findings.problem)
        return Finding(name="dashinfer", status=failed or "unusable", detail=findings.problem, fix=fix)
    size = f", {disk_bytes(environment.folder) / 1e9:.2f} GB" if environment.folder else ""
    detail = f"{findings.version} under Python {findings.python}, {kind(environment)}{size}, {environment.python}"
    return Finding(name="dashinfer", status="ok", detail=detail)


def kind(environment: Environment) -> str:
    """The kind of an environment, with the devices that it can use here."""
    devices = cuda_devices()
    if not environment.cpu_only:
        return f"full, {devices} CUDA devices"
    return "CPU only" + "; for the GPU, run `dashinfer-vlm dashinfer install`" * bool(devices)


def _fix(environment: Environment, problem: str) -> str:
    if "libcuda" in problem or "libnvidia-ml" in problem:
        return "Install the GPU's driver, or run `dashinfer-vlm dashinfer install --cpu`."
    return f"Run `dashinfer-vlm dashinfer install{' --cpu' * environment.cpu_only}` to repair it."
