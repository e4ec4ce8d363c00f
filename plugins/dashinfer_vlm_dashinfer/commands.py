"""`dashinfer-vlm dashinfer`: install, status."""

from __future__ import annotations

from pathlib import Path

import click

from dashinfer_vlm_core.config import EngineConfig

from .checks import check_environment
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
    install(config, python=python, cpu=cpu, kit=kit, report=lambda line: click.echo(line, err=True))
    click.echo(f"DashInfer: {check_environment(config).detail}")


@dashinfer.command("status", short_help="Show what is installed and whether it loads.")
@_CACHE
@click.pass_context
def status_command(context: click.Context, cache_dir: Path | None) -> None:
    """Show what is installed, whether it loads, and on which devices; exits with 1 if it cannot be used."""
    finding = check_environment(_config(cache_dir))
    click.echo(f"DashInfer: {finding.detail}")
    if finding.fix:
        click.echo(finding.fix)
    context.exit(int(finding.status != "ok"))


def _config(cache_dir: Path | None) -> EngineConfig:
    return EngineConfig(cache_dir=cache_dir) if cache_dir else EngineConfig()
