"""`dashinfer-vlm tune`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import click
from click.core import ParameterSource

from dashinfer_vlm_core.cli.command import EngineCommand
from dashinfer_vlm_core.cli.terminal import show_table
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.kernels.choice import KernelSelector
from dashinfer_vlm_core.kernels.cpu import cpu_model
from dashinfer_vlm_core.kernels.tuned import TunedKernels, store_tuned
from dashinfer_vlm_core.kernels.workload import Workload, vision_workload

from .engines import log_warnings_only

if TYPE_CHECKING:
    import torch

    from dashinfer_vlm_core.text_spec import TextModelSpec

MARGIN = 0.9
"""A kernel set replaces one of higher priority if it needs at most this share of its time. Only linear layers are
measured: sets of higher priority also fuse norms and attention, and a choice must not depend on noise."""

MEMORY_BOUND_ROWS = 16
"""Passes of at most as many rows are limited by reading the weights, others by multiplying."""


class TunedPart(NamedTuple):
    """The measurement of a text model or a vision encoder.

    Attributes:
        workload: what was measured.
        seconds: seconds of a forward pass by its number of rows, of each kernel set.
        tuned: the result.
        bytes_per_weight: of the model's dtype.
    """

    workload: Workload
    seconds: Mapping[str, Mapping[int, float]]
    tuned: TunedKernels
    bytes_per_weight: int


@click.command(cls=EngineCommand)
@click.argument("name", metavar="[MODEL]", required=False)
def tune(*, name: str | None, config: EngineConfig) -> None:
    """Measure the CPU kernels with a model, and store the fastest for its next starts.

    MODEL is a registered name, a checkpoint folder, or a Hugging Face model ID; by default, that of --model. Every
    kernel set that can run on this machine is timed with the linear layers of the text model and of the vision
    encoder, at several numbers of rows, which takes some minutes for large models. The weights are random: they are
    not read.

    Run it on an idle machine. Without it, a start uses the set with the highest priority that can run on the
    processor. --cpu-kernels NAME at start overrides both.
    """
    log_warnings_only()
    source = click.get_current_context().get_parameter_source("model")
    if name is not None and source is ParameterSource.COMMANDLINE:
        raise click.UsageError("The model is given twice: as MODEL and by --model. Leave out one of the two.")
    if name is not None:
        config = config.model_copy(update={"model": name})
    click.echo(f"{config.name} on {cpu_model()}")
    for part in measure_model(config):
        _show(part)
        try:
            click.echo(f"Stored in {store_tuned(config, part.tuned)}")
        except (OSError, RuntimeError) as error:
            raise click.ClickException(f"The result cannot be stored: {error}. Choose another --cache-dir.") from error
    if config.cpu_kernels != "auto":
        click.echo(f"`cpu_kernels` is set to {config.cpu_kernels}: with this option, the result is not used.", err=True)


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
    yield _measure_part(selector, config.name, device, dtype, spec.text)
    if vision is not None:
        yield _measure_part(selector, config.name, device, dtype, None)


def _measure_part(
    selector: KernelSelector, model: str, device: str, dtype: torch.dtype, text: TextModelSpec | None
) -> TunedPart:
    from dashinfer_vlm_core.kernels.measure import measure

    workload, sets = selector.tuning(device, dtype, text)
    seconds = {name: measure(kernels, workload, dtype) for name, kernels in sets.items()}
    scores = {name: workload.score(found) for name, found in seconds.items()}
    conditions = selector.conditions(workload, dtype, sets)
    tuned = TunedKernels(model=model, conditions=conditions, chosen=fastest(scores), scores=scores)
    return TunedPart(workload, seconds, tuned, dtype.itemsize)


def fastest(scores: Mapping[str, float]) -> str:
    """Return the name of the fastest set, from the highest priority to the lowest; see `MARGIN`."""
    best = ""
    for name, seconds in scores.items():
        if not best or seconds < MARGIN * scores[best]:
            best = name
    return best


def _show(part: TunedPart) -> None:
    click.echo(f"\nThe linear layers of the {part.workload.name}, by number of rows in a forward pass:\n")
    scores = part.tuned.scores
    cells = [[name, *_cells(part, name), f"{1000 * score:,.0f} ms"] for name, score in scores.items()]
    show_table(("Kernels", *(str(rows) for rows, _ in part.workload.passes), "Reference request"), cells)
    click.echo(f"\nChoice: {part.tuned.chosen}, since {_explain(scores, part.tuned.chosen)}.")


def _cells(part: TunedPart, name: str) -> Iterator[str]:
    """Yield time and rate of each pass. Compressed weights count with the size of the model's dtype."""
    for rows, seconds in part.seconds[name].items():
        weights = part.workload.weights_at(rows)
        rate = f"{2 * weights * rows / seconds / 1e9:,.0f} GFLOP/s"
        if rows <= MEMORY_BOUND_ROWS:
            rate = f"{weights * part.bytes_per_weight / seconds / 1e9:.1f} GB/s"
        yield f"{1000 * seconds:,.1f} ms, {rate}"


def _explain(scores: Mapping[str, float], chosen: str) -> str:
    best = min(scores, key=scores.__getitem__)
    if len(scores) == 1:
        return "it is the only set that can run the model here"
    if best != chosen:
        return f"{best} needs less time, but not {1 - MARGIN:.0%} less, and {chosen} has a higher priority"
    second = min(score for name, score in scores.items() if name != chosen)
    return f"it needs the least time, {scores[chosen] / second:.2f} of the second best"
