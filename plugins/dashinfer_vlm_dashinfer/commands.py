"""`dashinfer-vlm dashinfer`: install, status."""

from __future__ import annotations

from pathlib import Path

import click

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import MissingDependency
from dashinfer_vlm_core.kernels.devices import cuda_devices

from .environment import Environment, Findings, disk_bytes, examine, find_environment
from .install import install

_CACHE = click.option(
    "--cache-dir",
    type=click.Path(path_type=Path),
    help="Folder to use in place of the user's cache.",
)


@click.group("dashinfer")
def dashinfer() -> None:
    """Manage the DashInfer decoder's environment."""


@dashinfer.command("install", short_help="Create DashInfer's environment and check that it loads.")
@click.option("--python", type=click.Path(path_type=Path), help="A CPython 3.10 to use; searched for by default.")
@click.option(
    "--cpu", is_flag=True, help="Install for the CPU only, without CUDA's libraries; needs about 3% of the disk space."
)
@click.option(
    "--kit",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="A kit to unpack, for one GPU without a network; `scripts/make-dashinfer-kit` makes it.",
)
@_CACHE
def install_command(python: Path | None, cpu: bool, kit: Path | None, cache_dir: Path | None) -> None:
    """Create DashInfer's environment in the user's cache and check that it loads.

    It takes 6.6 GB (3.4 GB to download), 0.2 GB (0.32 GB to download) with --cpu, which requires a C compiler, or 1.5
    GB with --kit.

    DashInfer's wheels are for CPython 3.10. The environment has its own interpreter, whatever Python runs this command.
    Run the command again to repair the environment.
    """
    if kit and (cpu or python):
        raise click.UsageError("`--kit` contains an interpreter and is for a GPU: remove `--python` and `--cpu`.")
    config = _config(cache_dir)
    findings = install(config, python=python, cpu=cpu, kit=kit, report=lambda line: click.echo(line, err=True))
    click.echo(f"DashInfer {findings.version} loads under Python {findings.python}, {_devices(findings)}.")


@dashinfer.command("status", short_help="Show what is installed and whether it loads.")
@_CACHE
@click.pass_context
def status_command(context: click.Context, cache_dir: Path | None) -> None:
    """Show what is installed, whether it loads, and on which devices; exits with 1 if it cannot be used."""
    try:
        environment = find_environment(_config(cache_dir))
    except MissingDependency as error:
        click.echo(error.message)
        context.exit(1)
    findings = examine(environment)
    for line in _lines(environment, findings):
        click.echo(line)
    context.exit(1 if findings.problem else 0)


def _lines(environment: Environment, findings: Findings) -> list[str]:
    lines = [
        f"environment: {environment.python} ({environment.origin})",
        f"Python:      {findings.python or 'unknown'}",
        f"kind:        {_kind(environment)}",
    ]
    if environment.folder is not None:
        lines.append(f"size:        {disk_bytes(environment.folder) / 1e9:.2f} GB on disk")
    if findings.problem:
        return [*lines, f"It does not load: {findings.problem}", f"Next: {_next_step(environment, findings)}"]
    return [*lines, f"DashInfer:   {findings.version}", f"It loads, {_devices(findings)}."]


def _kind(environment: Environment) -> str:
    if environment.cpu_only:
        return "for the CPU only, without CUDA's libraries"
    stubs = f"; stub libraries for a GPU driver: {environment.stubs}" if environment.stubs.exists() else ""
    return f"full, for GPUs and the CPU{stubs}"


def _next_step(environment: Environment, findings: Findings) -> str:
    if "libcuda" in findings.problem or "libnvidia-ml" in findings.problem:
        return "install the GPU's driver, or run `dashinfer-vlm dashinfer install --cpu`."
    return f"run `dashinfer-vlm dashinfer install{' --cpu' * environment.cpu_only}` to repair it."


def _devices(findings: Findings) -> str:
    count = cuda_devices()
    if not count:
        return "on the CPU only" if findings.cpu_only else "on the CPU; there is no CUDA device"
    if findings.cpu_only:
        return "on the CPU only: run `dashinfer-vlm dashinfer install` for an environment that uses the GPU"
    return f"on the CPU and on {count} CUDA device(s)"


def _config(cache_dir: Path | None) -> EngineConfig:
    return EngineConfig(cache_dir=cache_dir) if cache_dir else EngineConfig()
