"""What `dashinfer-vlm doctor` says of DashInfer."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

from ...config import EngineConfig
from ...errors import MissingDependency
from ...hookspecs import Finding, Status
from .environment import disk_bytes, examine, find_environment


def check(config: EngineConfig) -> Iterator[Finding]:
    """Whether its environment is there and works, and whether models can be converted."""
    yield _environment(config)
    if config.decoder == "dashinfer":
        yield from _cache(config)


def _cache(config: EngineConfig) -> Iterator[Finding]:
    folder = config.cache_folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        detail = f"{folder}: {error.strerror}; DashInfer keeps its environment and converted models there"
        fix = "Make it writable, or choose another by `cache_dir`."
        yield Finding(name="dashinfer cache", status="broken", detail=detail, fix=fix)


def _environment(config: EngineConfig) -> Finding:
    needed: Status | None = "broken" if config.decoder == "dashinfer" else None
    try:
        environment = find_environment(config)
    except MissingDependency as error:
        return Finding(name="dashinfer", status=needed or "missing", detail="not installed", fix=error.message)
    findings = examine(environment)
    if findings.problem:
        fix = "Run: dashinfer-vlm dashinfer status"
        return Finding(name="dashinfer", status=needed or "unusable", detail=findings.problem, fix=fix)
    devices = "for the CPU only" if findings.cpu_only else f"full, {findings.cuda} CUDA devices"
    size = f", {disk_bytes(environment.folder) / 1e9:.2f} GB" if environment.folder else ""
    detail = f"{findings.version} under Python {findings.python}, {devices}{size}"
    return Finding(name="dashinfer", status="ok", detail=detail)
