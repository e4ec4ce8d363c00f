"""`dashinfer-vlm verify`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dashinfer_vlm_core.config import EngineConfig

from .engines import log_warnings_only

if TYPE_CHECKING:
    from dashinfer_vlm_core.plugins import Registry

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
MODELS = ("tiny", "small", "2b", "7b")
NO_MODEL = "none"
DEFAULT_MINUTES = 9.0
UNUSABLE = 2
"""Exit code if the device cannot be used."""


class Device(click.ParamType[str]):
    """A device that can be verified."""

    name = "DEVICE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not re.fullmatch(r"cpu|cuda(:\d+)?", str(value)):
            self.fail(f"{value!r} cannot be verified. Write cpu, cuda or cuda:N.", param, ctx)
        return str(value)


@click.command()
@click.option("--device", default="cuda", show_default=True, type=Device(), help="cuda, cuda:N or cpu.")
@click.option("--family", "families", multiple=True, type=click.Choice(FAMILIES),
              help="Model family to check; can be repeated.  [default: all]")  # fmt: skip
@click.option("--model", "models", multiple=True, type=click.Choice([*MODELS, NO_MODEL]),
              help="Model to time, of random weights; can be repeated. 7b takes 17 GB on disk, and 26 GB on the"
              " device.  [default: small and 2b on CUDA, tiny on a CPU]")  # fmt: skip
@click.option("--minutes", default=DEFAULT_MINUTES, show_default=True, type=click.FloatRange(min=0), metavar="NUMBER",
              help="Time limit. Timings that do not fit are skipped and named; all checks run.")  # fmt: skip
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
              help="Where models are created, and deleted at the end.  [default: the cache folder]")  # fmt: skip
@click.option("--traces", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
              help="Also write traces of decode steps on CUDA, which ui.perfetto.dev displays.")  # fmt: skip
@click.option("--out", type=click.Path(dir_okay=False, writable=True, path_type=Path), metavar="FILE",
              help="Also write the report to this file.")  # fmt: skip
@click.pass_context
def verify(
    context: click.Context,
    /,
    *,
    device: str,
    families: tuple[str, ...],
    models: tuple[str, ...],
    minutes: float,
    folder: Path | None,
    traces: Path | None,
    out: Path | None,
) -> None:
    """Verify the vision encoder and the PyTorch decoder on a GPU, and measure their speed.

    Tiny models of random weights must give the tokens that transformers gives on the same device: texts, images,
    videos, batches, the prefix cache, canceled requests. Larger models of random weights are then timed and compared
    with the memory bandwidth and the matrix rate of the device. Nothing is downloaded. The report is Markdown.

    Exit codes: 0 all checks passed, 1 a check failed, 2 the device cannot be used.
    """
    if NO_MODEL in models and len(models) > 1:
        raise click.UsageError(f"`--model {NO_MODEL}` excludes other models.")
    if reason := _unusable(device):
        click.echo(reason, err=True)
        context.exit(UNUSABLE)
    log_warnings_only()

    from .verification.report import markdown
    from .verification.run import Options, Verification

    scratch = folder or EngineConfig().cache_folder
    scratch.mkdir(parents=True, exist_ok=True)
    options = Options(
        device=device,
        families=families or FAMILIES,
        models=() if NO_MODEL in models else models or (("small", "2b") if device.startswith("cuda") else ("tiny",)),
        seconds=60 * minutes,
        scratch=scratch,
        traces=traces,
    )
    report = Verification(options, context.obj or _installed_plugins(), _note).run()
    text = markdown(report)
    if out:
        out.write_text(text, encoding="utf-8")
    click.echo(text)
    context.exit(1 if report.failed else 0)


def _installed_plugins() -> Registry:
    from dashinfer_vlm_core.plugins import load_plugins

    return load_plugins()


def _unusable(device: str) -> str:
    """Return why a device cannot be used, and the next step; empty if it can."""
    import torch

    if device == "cpu":
        return ""
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is a build without CUDA: install one with CUDA"
    elif not torch.cuda.is_available():
        reason = f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU or no driver: check `nvidia-smi`"
    elif (torch.device(device).index or 0) >= torch.cuda.device_count():
        reason = f"the number of GPUs here is {torch.cuda.device_count()}: they are numbered from 0"
    else:
        return ""
    return f"`--device {device}` cannot be used here: {reason}. `--device cpu` runs the same checks on the CPU."


def _note(step: str) -> None:
    click.echo(f"... {step}", err=True)
