"""What `dashinfer-vlm doctor` says of DashInfer."""

from __future__ import annotations

from collections.abc import Iterator

from ...config import EngineConfig
from ...errors import MissingDependency
from ...hookspecs import Finding, Status
from .environment import disk_bytes, examine, find_environment


def check(config: EngineConfig) -> Iterator[Finding]:
    """Whether its environment is there and works."""
    yield _environment(config)


def _environment(config: EngineConfig) -> Finding:
    needed: Status | None = "broken" if config.decoder == "dashinfer" else None
    try:
        environment = find_environment(config)
    except MissingDependency as error:
        return Finding(name="dashinfer", status=needed or "missing", detail="not installed", mend=error.message)
    findings = examine(environment)
    if findings.problem:
        mend = "Run: dashinfer-vlm dashinfer status"
        return Finding(name="dashinfer", status=needed or "unusable", detail=findings.problem, mend=mend)
    devices = "for the CPU only" if findings.cpu_only else f"full, {findings.cuda} CUDA devices"
    size = f", {disk_bytes(environment.folder) / 1e9:.2f} GB" if environment.folder else ""
    detail = f"{findings.version} under Python {findings.python}, {devices}{size}"
    return Finding(name="dashinfer", status="ok", detail=detail)
