"""The checks of DashInfer for `dashinfer-vlm doctor`."""

from __future__ import annotations

from collections.abc import Iterator

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.config.folders import write_error
from dashinfer_vlm_core.errors import MissingDependency
from dashinfer_vlm_core.findings import Finding, Status
from dashinfer_vlm_core.kernels.devices import cuda_devices

from .environment import disk_bytes, examine, find_environment


def check(config: EngineConfig) -> Iterator[Finding]:
    """Check that the environment exists and works, and that models can be converted."""
    yield _environment(config)
    if config.decoder == "dashinfer":
        yield from _cache(config)


def _cache(config: EngineConfig) -> Iterator[Finding]:
    folder = config.cache_folder
    if error := write_error(folder):
        detail = f"{folder}: {error}; DashInfer stores its environment and converted models there"
        fix = "Make it writable, or set `cache_dir` to another folder."
        yield Finding(name="dashinfer cache", status="broken", detail=detail, fix=fix)


def _environment(config: EngineConfig) -> Finding:
    failed: Status | None = "broken" if config.decoder == "dashinfer" else None
    try:
        environment = find_environment(config)
    except MissingDependency as error:
        return Finding(name="dashinfer", status=failed or "missing", detail="not installed", fix=error.message)
    findings = examine(environment)
    if findings.problem:
        fix = "Run: dashinfer-vlm dashinfer status"
        return Finding(name="dashinfer", status=failed or "unusable", detail=findings.problem, fix=fix)
    devices = "CPU only" if findings.cpu_only else f"full, {cuda_devices()} CUDA devices"
    size = f", {disk_bytes(environment.folder) / 1e9:.2f} GB" if environment.folder else ""
    detail = f"{findings.version} under Python {findings.python}, {devices}{size}"
    return Finding(name="dashinfer", status="ok", detail=detail)
