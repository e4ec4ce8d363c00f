"""`dashinfer-vlm verify`."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.config.folders import cache_problem, write_error
from dashinfer_vlm_core.errors import ConfigError

from .engines import log_warnings_only

if TYPE_CHECKING:
    from dashinfer_vlm_core.plugins import Registry

    from .verification.report import Results

SIZES = ("tiny", "small", "2b", "7b")
NO_MODEL = "none"
UNUSABLE = 2  # exit code if the device cannot be used


@click.command()
@click.option("--device", default="cuda", show_default=True, help="cuda, cuda:N or cpu.")
@click.option("--family", "families", multiple=True, metavar="NAME",
              help="`model_type` of a model family to check; can be repeated.  [default: all]")  # fmt: skip
@click.option("--model", "sizes", multiple=True, type=click.Choice([*SIZES, NO_MODEL]),
              help="Size of a model of the first family to time; can be repeated. 7b takes 15 GB of memory and of disk,"
              " and 24 GB of the device.  [default: small and 2b on CUDA, tiny on a CPU]")  # fmt: skip
@click.option("--minutes", default=9.0, show_default=True, type=click.FloatRange(min=0), metavar="NUMBER",
              help="Time limit. Timings that do not fit are skipped and named; all checks run.")  # fmt: skip
@click.pass_context
def verify(
    context: click.Context,
    /,
    *,
    device: str,
    families: tuple[str, ...],
    sizes: tuple[str, ...],
    minutes: float,
) -> None:
    """Verify the vision encoder and the decoders on a GPU, and measure their speed.

    Tiny models of random weights must give the tokens that transformers gives on the same device: texts, images,
    videos, batches, the prefix cache, canceled requests. Larger models of random weights are then timed and compared
    with the memory bandwidth and the matrix rate of the device. Nothing is downloaded.

    Exit codes: 0 all checks passed, 1 a check failed, 2 the device cannot be used.
    """
    if NO_MODEL in sizes and len(sizes) > 1:
        raise click.UsageError(f"`--model {NO_MODEL}` excludes other models.")
    if reason := _unusable(device):
        click.echo(f"`--device {device}` cannot be used: {reason} Use cuda, cuda:N or cpu.", err=True)
        context.exit(UNUSABLE)
    log_warnings_only()

    from dashinfer_vlm_core.plugins import load_plugins

    from .verification import report

    registry: Registry = context.obj or load_plugins()
    default = ("small", "2b") if device.startswith("cuda") else ("tiny",)
    sizes = () if NO_MODEL in sizes else sizes or default
    results = report.Results(device, 60 * minutes, lambda step: click.echo(f"... {step}", err=True))
    for family in families:
        registry.family(family)
    asyncio.run(_verify(results, registry, families or sorted(registry.families), sizes))
    click.echo(report.as_markdown(results))
    context.exit(1 if results.failed else 0)


async def _verify(results: Results, registry: Registry, families: Sequence[str], sizes: Sequence[str]) -> None:
    from transformers import CONFIG_MAPPING

    from .verification import checks, timings
    from .verification.checkpoint import Checkpoint

    parent = EngineConfig().cache_folder
    if error := write_error(parent):
        raise ConfigError(cache_problem(parent, error), param="cache_dir")
    with tempfile.TemporaryDirectory(prefix="dashinfer-vlm-verify-", dir=parent) as scratch:
        for family in families:
            if family not in CONFIG_MAPPING:
                results.skipped[family] = "transformers has no such model to compare it with"
                continue
            checkpoint = Checkpoint(registry=registry, device=results.device, folder=Path(scratch, family))
            await results.check(family, checks.check_family(results, checkpoint, family))
            timings.free_memory()
        if sizes:
            await results.check("limits of the device", timings.measure_limits(results))
        for size in sizes:
            checkpoint = Checkpoint(registry=registry, device=results.device, folder=Path(scratch, size))
            await results.check(f"timings of {size}", timings.time_model(results, checkpoint, families[0]))
            shutil.rmtree(checkpoint.folder, ignore_errors=True)
            timings.free_memory()


def _unusable(device: str) -> str:
    import torch

    try:
        torch.zeros(1, device=device)
    except Exception as error:  # noqa: BLE001 - torch raises many kinds, without CUDA an AssertionError
        return str(error).split("\n")[0].rstrip(".") + "."
    return ""
