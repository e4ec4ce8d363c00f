"""`dashinfer-vlm tune`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from dashinfer_vlm_core.cli.command import EngineCommand
from dashinfer_vlm_core.cli.terminal import show_table
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.kernels.choice import MARGIN, KernelChoice, KernelSelector
from dashinfer_vlm_core.kernels.cpu import cpu_model
from dashinfer_vlm_core.kernels.workload import Workload, vision_workload

from .engines import log_warnings_only

if TYPE_CHECKING:
    import torch

    from dashinfer_vlm_core.text_spec import TextModelSpec

MEMORY_BOUND_ROWS = 16
"""Passes of at most as many rows are limited by reading the weights, others by multiplying."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedPart:
    """The measurement of a text model or a vision encoder.

    Attributes:
        workload: what was measured.
        choice: the result.
        failed: the kernel sets that cannot run on this machine, with the reasons.
        bytes_per_weight: of the model's dtype.
    """

    workload: Workload
    choice: KernelChoice
    failed: Mapping[str, str]
    bytes_per_weight: int

    @property
    def is_stored(self) -> bool:
        return self.workload.is_measured and self.choice.is_reliable

    def gb_per_second(self, rows: int, seconds: float) -> float:
        """Return the rate at which weights of the model's dtype are read; compressed ones take fewer bytes."""
        return self.workload.weights_at(rows) * self.bytes_per_weight / seconds / 1e9

    def gflop_per_second(self, rows: int, seconds: float) -> float:
        return 2 * self.workload.weights_at(rows) * rows / seconds / 1e9

    def explanation(self) -> str:
        """Say why the choice is what it is."""
        scores, chosen = self.choice.scores, self.choice.kernels.name
        best = min(scores, key=scores.__getitem__)
        if len(scores) == 1:
            return "it is the only set that can run the model here"
        if best != chosen:
            return f"{best} needs less time, but not {1 - MARGIN:.0%} less, and {chosen} has a higher priority"
        second = min(score for name, score in scores.items() if name != chosen)
        return f"it needs the least time, {scores[chosen] / second:.2f} of the second best"

    def as_json(self) -> dict[str, Any]:
        return {
            "part": self.workload.name,
            "chosen": self.choice.kernels.name,
            "reason": self.explanation(),
            "stored": self.is_stored,
            "sets": {name: self._set_as_json(name) for name in self.choice.scores},
            "unavailable": dict(self.failed),
        }

    def _set_as_json(self, name: str) -> dict[str, Any]:
        figures = self.choice.figures[name]
        passes = [
            {
                "rows": rows,
                "ms": 1000 * seconds,
                "gb_per_second": self.gb_per_second(rows, seconds),
                "gflop_per_second": self.gflop_per_second(rows, seconds),
                "estimated": rows in figures.estimated,
            }
            for rows, seconds in figures.seconds.items()
        ]
        return {"reference_request_seconds": self.choice.scores[name], "passes": passes}


@click.command(cls=EngineCommand)
@click.argument("name", metavar="[MODEL]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def tune(*, name: str | None, as_json: bool, config: EngineConfig) -> None:
    """Measure the CPU kernels with a model, and store the choice.

    MODEL is a registered name, a checkpoint folder, or a Hugging Face model ID; by default, that of --model. Every
    kernel set that can run on this machine is timed with the linear layers of the text model and of the vision
    encoder, at several numbers of rows, for at most about 3 seconds. The weights are random: they are not read.

    A start without a stored choice does the same by itself. Run this command to measure again, such as on an idle
    machine, or to measure before the first start. --cpu-kernels NAME at start overrides the choice.
    """
    log_warnings_only()
    source = click.get_current_context().get_parameter_source("model")
    if name is not None and source is ParameterSource.COMMANDLINE:
        raise click.UsageError("The model is given twice: as MODEL and by --model. Leave out one of the two.")
    if name is not None:
        config = config.model_copy(update={"model": name})
    parts = list(measure_model(config))
    if as_json:
        click.echo(json.dumps([part.as_json() for part in parts], indent=2))
    else:
        _show(config, parts)
    if config.cpu_kernels != "auto":
        click.echo(f"`cpu_kernels` is set to {config.cpu_kernels}: with this option, the choice is not used.", err=True)


def measure_model(config: EngineConfig) -> Iterator[TunedPart]:
    """Measure the kernel sets with a model's text model and vision encoder.

    Raises:
        SetupError: the model cannot be loaded.
        ConfigError: the device is not a CPU.
    """
    from dashinfer_vlm_core.models.checkpoint import find_model
    from dashinfer_vlm_core.models.placement import resolve_device, resolve_dtype
    from dashinfer_vlm_core.models.weights import torch_dtype
    from dashinfer_vlm_core.plugins import load_plugins

    registry = load_plugins()
    folder = find_model(config.model, registered=registry.models, revision=config.revision)
    family = registry.family_of(folder)
    spec = registry.load_spec(folder)
    device = resolve_device(config.device)
    stored = spec.quantization
    dtype = torch_dtype(resolve_dtype(config.dtype, spec.dtype, device, quantized=stored is not None))
    vision = vision_workload(family.vision_linears(spec), quantization=config.resolved_vision_quantization)
    stored_bits = stored.stored_bits if stored else "none"
    selector = KernelSelector(registry.kernels.values(), config, vision=vision, stored_bits=stored_bits)
    yield _measure_part(selector, device, dtype, spec.text)
    if vision is not None:
        yield _measure_part(selector, device, dtype, None)


def _measure_part(selector: KernelSelector, device: str, dtype: torch.dtype, text: TextModelSpec | None) -> TunedPart:
    choice = selector.measure(device, dtype, text)
    workload = selector.workload(text)
    assert workload is not None
    failed = selector.candidates(device, dtype, text).failed
    return TunedPart(
        workload=workload,
        choice=choice,
        failed={name: loaded.explanation for name, loaded in failed.items()},
        bytes_per_weight=dtype.itemsize,
    )


def _show(config: EngineConfig, parts: list[TunedPart]) -> None:
    click.echo(f"{config.name} on {cpu_model()}")
    for part in parts:
        click.echo(f"\nThe linear layers of the {part.workload.name}, by number of rows in a forward pass:\n")
        rows = [rows for rows, _ in part.workload.passes]
        cells = [[name, *_cells(part, name), f"{1000 * score:,.0f} ms"] for name, score in part.choice.scores.items()]
        show_table(("Kernels", *map(str, rows), "Reference request"), cells)
        click.echo(f"\nChoice: {part.choice.kernels.name}, since {part.explanation()}.")
        if not part.choice.is_reliable:
            click.echo("It is not stored: times vary, since other processes use the processor. Try again later.")
        elif not part.is_stored:
            click.echo(
                f"It is not stored: with {part.workload.weights:,} weights, a start selects kernels by priority."
            )
        for name, reason in part.failed.items():
            click.echo(f"{name} is not available: {reason}.")
    if any(part.choice.figures[name].estimated for part in parts for name in part.choice.figures):
        click.echo("\n~ estimated from fewer rows: the set is far slower than another one, or the time was used.")


def _cells(part: TunedPart, name: str) -> Iterator[str]:
    figures = part.choice.figures[name]
    for rows, seconds in figures.seconds.items():
        rate = (
            f"{part.gb_per_second(rows, seconds):.1f} GB/s"
            if rows <= MEMORY_BOUND_ROWS
            else f"{part.gflop_per_second(rows, seconds):,.0f} GFLOP/s"
        )
        yield f"{'~' if rows in figures.estimated else ''}{1000 * seconds:,.1f} ms, {rate}"
