"""`dashinfer-vlm tune`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import click

from dashinfer_vlm_core.cli.command import EngineCommand
from dashinfer_vlm_core.cli.options import ModelArgument
from dashinfer_vlm_core.cli.terminal import show_table
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.config.folders import cache_problem, write_error
from dashinfer_vlm_core.errors import ConfigError
from dashinfer_vlm_core.kernels.choice import KernelSelector
from dashinfer_vlm_core.kernels.devices import cpu_model, is_cpu
from dashinfer_vlm_core.kernels.openmp import environment_threads
from dashinfer_vlm_core.kernels.threads import Machine, set_threads
from dashinfer_vlm_core.kernels.tuned import (
    FOLDER,
    ThreadConditions,
    TunedKernels,
    TunedThreads,
    WeightRates,
    store_tuned,
)
from dashinfer_vlm_core.progress import show_progress

from .bench import Measurement, Workload, measure
from .engines import log_warnings_only

if TYPE_CHECKING:
    import torch

    from dashinfer_vlm_core.engine import Engine
    from dashinfer_vlm_core.kernels.types import Kernels
    from dashinfer_vlm_core.plugins import Registry

MARGIN = 0.9
"""A kernel set replaces one of higher priority if it needs at most this share of its time: a choice must not depend on
noise."""

IMAGE_SIZE = (224, 224)
WORDS = 64
TOKENS = 16
AT_ONCE = 4
"""A round has one request alone and then several at once, each with an image, so many words, and tokens to generate."""

MIN_ROUNDS = 2
MAX_ROUNDS = 8
ROUNDS_SECONDS = 2.0
"""Rounds of a kernel set until they have taken so many seconds. The fastest one counts: other processes use the
processor too."""

MEASURED = {"media_workers": 0, "speculative_method": "none", "speculative_model": None, "weight_cache_mib": 0}
"""Options of the measured engines. Accepted drafts depend on the text, which depends on the rounding of the kernels.
Storing converted weights would take time of the processor and the memory."""


class Round(NamedTuple):
    """Reference requests that one kernel set completed."""

    alone: Measurement
    at_once: Measurement

    @property
    def seconds(self) -> float:
        return self.alone.seconds + self.at_once.seconds


@click.command(cls=EngineCommand, params=[ModelArgument()])
def tune(*, config: EngineConfig) -> None:
    """Measure the CPU kernels with a model, and store the fastest for its next starts.

    MODEL is a registered name, a checkpoint folder, or a Hugging Face model ID; by default, that of --model. Every
    kernel set that can run on this machine loads the model and completes the same reference requests, which takes some
    minutes for large models.

    Run it on an idle machine. Without it, a start uses the set with the highest priority that can run on the
    processor. --cpu-kernels NAME at start overrides both.
    """
    from dashinfer_vlm_core.plugins import load_plugins

    log_warnings_only()
    if error := write_error(config.cache_folder / FOLDER):  # before it measures for minutes
        raise _not_stored(config, error)
    click.echo(f"{config.name} on {cpu_model()}\n")
    registry = load_plugins()
    measured = _with_default_threads(config.model_copy(update=MEASURED))
    set_threads(measured)
    dtype, sets = _usable_sets(config, registry)
    with show_progress("Measuring the memory"):
        bandwidth, rates = _measure_memory(dtype, sets)
    rounds = _measure_sets(measured, list(sets))
    seconds = {name: each.seconds for name, each in rounds.items()}
    chosen = fastest(seconds)
    _show(rounds)
    click.echo(f"\nChoice: {chosen}. A set replaces one of higher priority if it takes {1 - MARGIN:.0%} less time.")
    click.echo(f"Memory bandwidth: {bandwidth / 1e9:,.1f} GB/s")
    if measured.cpu_threads != config.cpu_threads:
        _tune_threads(config, measured.model_copy(update={"cpu_kernels": chosen}), seconds[chosen])
    conditions = KernelSelector(registry.kernels.values(), config).conditions()
    _store(
        config, TunedKernels(conditions=conditions, chosen=chosen, seconds=seconds, bandwidth=bandwidth, rates=rates)
    )


def _with_default_threads(config: EngineConfig) -> EngineConfig:
    """Return the configuration with the number of threads that a start uses without a measurement, unless it is set."""
    if config.cpu_threads is not None or environment_threads():
        return config
    return config.model_copy(update={"cpu_threads": Machine.read().candidates()[0]})


def _tune_threads(config: EngineConfig, measured: EngineConfig, seconds: float) -> None:
    """Measure other numbers of threads with the fastest kernel set, if this machine has any, and store the fastest.

    Args:
        config: the configuration that the result is for.
        measured: that of the measured engines.
        seconds: the time that they needed with the default.
    """
    candidates = Machine.read().candidates()
    if len(candidates) == 1:
        return
    found = {candidates[0]: seconds}
    for count in candidates[1:]:
        with show_progress(f"Measuring {count} threads"):
            found[count] = _measure(measured.model_copy(update={"cpu_threads": count})).seconds
    chosen = int(fastest({str(count): total for count, total in found.items()}))
    click.echo("")
    show_table(("Threads", "Reference requests"), [(str(count), f"{total:,.2f} s") for count, total in found.items()])
    click.echo(f"\nThreads: {chosen}")
    _store(config, TunedThreads(conditions=ThreadConditions.of(config, candidates), chosen=chosen, seconds=found))
    set_threads(config)


def _usable_sets(config: EngineConfig, registry: Registry) -> tuple[torch.dtype, dict[str, Kernels]]:
    """Return the dtype of the model, and the sets that can run it, from the highest priority to the lowest.

    If some of them keep the bits of a quantized checkpoint in memory, only these.
    """
    from dashinfer_vlm_core.kernels.linears import supported_bits
    from dashinfer_vlm_core.models.checkpoint import find_model
    from dashinfer_vlm_core.models.placement import resolve_placement

    spec = registry.load_spec(find_model(config.model, registered=registry.models, revision=config.revision))
    device, dtype = resolve_placement(config, spec)
    if not is_cpu(device):
        raise ConfigError(f"Kernel sets are measured only on a CPU, not on {device}.", param="device")
    candidates = KernelSelector(registry.kernels.values(), config).candidates(device, dtype, spec.text)
    usable = {name: loaded.kernels for name, loaded in candidates.items() if loaded.kernels}
    bits = spec.quantization.stored_bits if spec.quantization else "none"
    return dtype, {name: kernels for name, kernels in usable.items() if bits in supported_bits(kernels)} or usable


def _measure_memory(dtype: torch.dtype, sets: Mapping[str, Kernels]) -> tuple[float, dict[str, WeightRates]]:
    from dashinfer_vlm_core.kernels.bandwidth import measure_bandwidth, measure_rates

    return measure_bandwidth(), {name: measure_rates(kernels, dtype) for name, kernels in sets.items()}


def _measure_sets(config: EngineConfig, names: list[str]) -> dict[str, Round]:
    rounds: dict[str, Round] = {}
    for name in names:
        try:
            with show_progress(f"Measuring {name}"):
                rounds[name] = _measure(config.model_copy(update={"cpu_kernels": name}))
        except ConfigError as error:  # noqa: PERF203 - a set takes seconds
            click.echo(f"{name} is left out: {error.message}", err=True)
            if name == names[-1] and not rounds:
                raise
    return rounds


def _measure(config: EngineConfig) -> Round:
    from dashinfer_vlm_core.engine import Engine

    with Engine(config) as engine:
        _complete(engine, seed=0, count=1)  # libraries generate code at the first request
        rounds: list[Round] = []
        while len(rounds) < MIN_ROUNDS or (
            len(rounds) < MAX_ROUNDS and sum(each.seconds for each in rounds) < ROUNDS_SECONDS
        ):
            seed = 2 * len(rounds) + 1
            rounds.append(Round(_complete(engine, seed, count=1), _complete(engine, seed + 1, count=AT_ONCE)))
    return min(rounds, key=lambda each: each.seconds)


def _complete(engine: Engine, seed: int, count: int) -> Measurement:
    workload = Workload(images=1, size=IMAGE_SIZE, words=WORDS, tokens=TOKENS, seed=seed)
    found = asyncio.run(measure(engine, [workload.request(index) for index in range(count)], concurrency=count))
    if found.errors:
        raise click.ClickException(found.errors[0])
    return found


def fastest(seconds: Mapping[str, float]) -> str:
    """Return the name of the fastest set, from the highest priority to the lowest; see `MARGIN`."""
    best = ""
    for name, total in seconds.items():
        if not best or total < MARGIN * seconds[best]:
            best = name
    return best


def _show(rounds: Mapping[str, Round]) -> None:
    rows = []
    for name, each in rounds.items():
        times = each.alone.times()
        first = f"{times['ttft_ms']['mean']:,.1f} ms"
        others = f"{times['tpot_ms']['mean']:,.1f} ms"
        rate = f"{each.at_once.rates()['output_tokens_per_second']:,.1f} tokens/s"
        rows.append((name, first, others, rate, f"{each.seconds:,.2f} s"))
    show_table(("Kernels", "First token", "Next tokens", f"{AT_ONCE} at once", "Reference requests"), rows)


def _not_stored(config: EngineConfig, reason: str) -> click.ClickException:
    return click.ClickException(f"The result cannot be stored. {cache_problem(config.cache_folder, reason)}")


def _store(config: EngineConfig, tuned: TunedKernels | TunedThreads) -> None:
    try:
        click.echo(f"Stored in {store_tuned(config, tuned)}")
    except OSError as error:
        raise _not_stored(config, error.strerror or str(error)) from error
    if isinstance(tuned, TunedKernels) and config.cpu_kernels != "auto":
        click.echo(f"`cpu_kernels` is set to {config.cpu_kernels}: with this option, the result is not used.", err=True)
