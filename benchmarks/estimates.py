"""Compare estimates of memory and speed with measurements: a table with a row for each model and bits per weight.

    python -m benchmarks.estimates [--models small,2b] [--folder FOLDER]

Each row is measured in its own process, which generates 64 tokens for a short text, and for an image. `Memory` is that
of the engine and its media workers; the estimate of it has what is in the caches then, not full ones. `Tokens/s` is the
rate after the first token, without speculation; the estimate uses what `tune` measures, measured just before.
Ratios are estimates divided by measurements. `DASHINFER_VLM_CPU_KERNELS` selects the kernels.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click
import torch

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.concurrency.memory import resident_bytes
from dashinfer_vlm_core.kernels.bandwidth import measure_bandwidth, measure_rates
from dashinfer_vlm_core.kernels.choice import KernelSelector
from dashinfer_vlm_core.kernels.tuned import WeightRates
from dashinfer_vlm_core.models.memory import MemoryEstimate, ModelSize, kv_bytes_per_token, state_bytes
from dashinfer_vlm_core.models.placement import estimate_model
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_core.text_spec import TextModelSpec

from .models import CACHE, checkpoint, model_names
from .workloads import image_part

TOKENS = 64
ROUNDS = 5
"""Responses for each rate, of which the median counts."""

WARM_UP_SECONDS = 12.0
BITS: Mapping[int, Literal["none", "int8", "int4"]] = {16: "none", 8: "int8", 4: "int4"}
COLUMNS = (
    "Model",
    "Bits",
    "Memory, MB",
    "estimated",
    "ratio",
    "Tokens/s, text",
    "image",
    "estimated",
    "ratio, text",
    "image",
)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What an engine took, and its estimate.

    Attributes:
        memory: bytes of the process, after both responses.
        estimate: of its memory.
        cached: bytes of keys, values and recurrent states that were written.
        bandwidth: of the machine's memory, in bytes per second.
        rates: of the kernels, by their name.
        text_rate: tokens per second after the first one, of the text prompt; the median of `ROUNDS` responses.
        image_rate: those of the prompt with an image.
    """

    memory: int
    estimate: MemoryEstimate
    cached: int
    bandwidth: float
    rates: Mapping[str, WeightRates]
    text_rate: float
    image_rate: float

    def cells(self) -> Iterator[str]:
        """Yield the cells of the table after the model and the bits; a ratio is estimated by measured."""
        memory = self.estimate.weights + self.estimate.process + self.cached
        rate = self.estimate.tokens_per_second(self.bandwidth, self.rates)
        yield from (f"{self.memory / 1e6:,.0f}", f"{memory / 1e6:,.0f}", f"{memory / self.memory:.2f}")
        yield from (f"{self.text_rate:.1f}", f"{self.image_rate:.1f}", f"{rate:.1f}")
        yield from (f"{rate / self.text_rate:.2f}", f"{rate / self.image_rate:.2f}")


def measure(folder: Path, bits: int) -> Measurement:
    """Measure a model in this process, which loads nothing else."""
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        quantization=BITS[bits],
        speculative_method="none",
        weight_cache_mib=0,  # whose file would be written at the same time
        max_model_len=2048,
    )
    registry = load_plugins()
    size = ModelSize.of(registry.load_spec(folder), uses_mtp=False)
    selector = KernelSelector(registry.kernels.values(), config)
    estimate = estimate_model(size, config, selector)
    kernels = selector.find("cpu", torch.bfloat16, size.text).kernels
    bandwidth, rates = measure_bandwidth(), {kernels.name: measure_rates(kernels, torch.bfloat16)}
    with Engine(config) as engine:
        text = {"type": "text", "text": "Describe a harbor in the evening."}
        _warm_up(engine, [image_part(random.Random(1)), text])
        contents = ([text], [image_part(random.Random(0)), text])
        rounds = [[_rate(engine, content) for content in contents] for _ in range(ROUNDS)]
        text_rate, image_rate = map(statistics.median, zip(*rounds, strict=True))
        return Measurement(
            text_rate=text_rate,
            image_rate=image_rate,
            memory=resident_bytes(),
            estimate=estimate,
            cached=_cached_bytes(engine, size.text),
            bandwidth=bandwidth,
            rates=rates,
        )


def _cached_bytes(engine: Engine, text: TextModelSpec) -> int:
    stats = engine.stats()
    assert stats
    itemsize = torch.bfloat16.itemsize
    states = stats.decoder.states_cached + 2 if text.delta_net else 0  # a running sequence had two
    return states * state_bytes(text, itemsize) + stats.decoder.kv_cached * kv_bytes_per_token(text, itemsize)


def _warm_up(engine: Engine, content: list[dict[str, Any]]) -> None:
    """Let media workers start, and weights move to huge pages, which both take time from the first steps."""
    end = time.perf_counter() + WARM_UP_SECONDS
    while time.perf_counter() < end:
        _rate(engine, content)


def _rate(engine: Engine, content: list[dict[str, Any]]) -> float:
    request = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0,
    }
    times = [time.perf_counter() for _ in engine.stream(request)]  # the first chunk comes with the first token
    return (TOKENS - 1) / (times[-1] - times[0])


def rows(names: Sequence[str], folder: Path) -> Iterator[str]:
    """Measure models, which are created in `folder`, and yield the lines of the table."""
    yield f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
    context = multiprocessing.get_context("spawn")
    for name in names:
        made = checkpoint(name, folder)
        for bits in BITS:
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                found = pool.submit(measure, made, bits).result()
            yield f"| {' | '.join([name, str(bits), *found.cells()])} |"


@click.command(help=__doc__, context_settings={"max_content_width": 100})
@click.option("--models", default=",".join(model_names()), help="By default, all.")
@click.option("--folder", default=CACHE, show_default=True, type=click.Path(path_type=Path))
def main(models: str, folder: Path) -> None:
    names = models.split(",")
    if unknown := set(names) - set(model_names()):
        raise click.BadParameter(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(model_names())}")
    for line in rows(names, folder):
        click.echo(line)


if __name__ == "__main__":
    main()
