"""`dashinfer-vlm quantize`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dashinfer_vlm_core.cli.command import EngineCommand
from dashinfer_vlm_core.cli.options import ModelArgument
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import ConfigError
from dashinfer_vlm_core.progress import Progress

from .engines import log_warnings_only

if TYPE_CHECKING:
    from dashinfer_vlm_core.models.quantizing.checkpoint_quantizer import Calibration
    from dashinfer_vlm_core.models.spec import ModelSpec

    from .recorded_engine import Request

GROUP_SIZES = ("32", "64", "128")


@click.command(cls=EngineCommand, params=[ModelArgument()])
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), metavar="FOLDER",
              help="New folder for the checkpoint.")  # fmt: skip
@click.option("--rotate", is_flag=True, help="Rotate hidden states first, so that none is much larger than the others.")
@click.option("--calibrate", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="Requests in the format of `batch`, to compensate rounding errors.")  # fmt: skip
@click.option("--group-size", type=click.Choice(GROUP_SIZES), default=GROUP_SIZES[0], show_default=True,
              help="Number of inputs that share a scale.")  # fmt: skip
def quantize(*, output: Path, rotate: bool, calibrate: Path | None, group_size: str, config: EngineConfig) -> None:
    """Write a checkpoint with 4-bit weights.

    MODEL is a registered name, a checkpoint folder, or a Hugging Face model ID. The layers of the text model have 4
    bits, the first and the last one 8; all else is copied. The new folder is in the format compressed-tensors.

    With --rotate, LoRA adapters, EAGLE heads and embeddings of the original do not fit the new checkpoint. With
    --calibrate, the model completes the requests on the CPU, whatever model and number of tokens they name. Engine
    options such as --max-pixels apply to them.
    """
    from dashinfer_vlm_core.models.quantizing.checkpoint_copy import check_output_folder, new_folder
    from dashinfer_vlm_core.models.quantizing.checkpoint_quantizer import CheckpointQuantizer, check_can_quantize

    from .recorded_engine import read_requests

    log_warnings_only()
    if config.quantization != "none":
        raise ConfigError(
            f"`quantization` {config.quantization} rounds weights while they are loaded. Remove it.",
            param="quantization",
        )
    check_output_folder(output)  # before a download
    spec = load_spec(config)
    check_can_quantize(spec)
    requests = read_requests(calibrate) if calibrate else None
    with (
        new_folder(output) as draft,
        _rotated(spec, config, draft.parent, rotate=rotate) as original,
        _calibration(original, config, requests) as calibration,
    ):
        quantizer = CheckpointQuantizer(original, int(group_size), calibration)
        with Progress(total=quantizer.num_tensors, desc="Quantizing", unit=" tensors") as progress:
            quantizer.write(draft, progress.update)
    sizes = f"{_weight_mb(output):,.1f} MB instead of {_weight_mb(spec.folder):,.1f} MB"
    click.echo(f"{output}: {quantizer.num_quantized} matrices quantized, {sizes}.")


def _weight_mb(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6


def load_spec(config: EngineConfig) -> ModelSpec:
    """Read the configuration of a model, with its task."""
    from dataclasses import replace

    from dashinfer_vlm_core.models.checkpoint import find_model
    from dashinfer_vlm_core.models.task import read_pooling
    from dashinfer_vlm_core.plugins import load_plugins

    registry = load_plugins()
    spec = registry.load_spec(find_model(config.model, registered=registry.models, revision=config.revision))
    return replace(spec, pooling=read_pooling(spec, config.task))


@contextmanager
def _rotated(spec: ModelSpec, config: EngineConfig, parent: Path, *, rotate: bool) -> Iterator[ModelSpec]:
    """Yield a temporary copy of the checkpoint with rotated hidden states, or the checkpoint itself."""
    from dashinfer_vlm_core.models.quantizing.rotation import CheckpointRotator

    if not rotate:
        yield spec
        return
    rotator = CheckpointRotator(spec)
    with tempfile.TemporaryDirectory(dir=parent, prefix=".rotated-") as folder:
        with Progress(total=rotator.num_tensors, desc="Rotating", unit=" tensors") as progress:
            rotator.write(Path(folder), progress.update)
        yield load_spec(config.model_copy(update={"model": folder, "revision": None}))


@contextmanager
def _calibration(
    spec: ModelSpec, config: EngineConfig, requests: Sequence[Request] | None
) -> Iterator[Calibration | None]:
    if requests is None:
        yield None
        return
    from .recorded_engine import PromptCalibration, RecordedEngine

    with RecordedEngine.open(config.model_copy(update={"model": str(spec.folder), "revision": None})) as opened:
        yield PromptCalibration(opened, spec, requests)
