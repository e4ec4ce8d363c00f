"""What quantized checkpoints take: the size of the file, memory, the time to load, and the time of a decode step.

    python -m benchmarks.formats [--model small|2b|FOLDER] [--variants awq,fp8] [--rounds 7]

Each variant is a checkpoint in a published layout, with the weights of the model rounded to the nearest values, or the
option `--quantization` for the unquantized model. It is loaded in its own process, next to one with the unquantized
model. The steps of both alternate in each round: a ratio is the median of the rounds, each with the fastest of some
steps. Checkpoints are in a temporary folder (`TMPDIR`), one at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import click

from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.kernels.choice import KernelSelector
from dashinfer_vlm_core.models.files import SINGLE
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_torch.decoder import TorchDecoder

from .attacks import resident_bytes
from .lora import chunks
from .models import checkpoint
from .quantized_model import LAYOUTS, write_quantized_model

SEQUENCES = (1, 8)
"""Numbers of sequences of a step."""
PROMPT_TOKENS = 32
STEPS = 5
"""Steps of a round, of which the fastest one counts."""


@dataclass(frozen=True)
class Variant:
    """One row of the table.

    Attributes:
        title: its title.
        layout: the checkpoint's layout, one of `LAYOUTS`; None for the unquantized checkpoint.
        quantization: the option of the engine.
    """

    title: str
    layout: str | None = None
    quantization: Literal["none", "int4", "int8"] = "none"


VARIANTS = {
    "int8": Variant("`--quantization int8`", quantization="int8"),
    "int4": Variant("`--quantization int4`", quantization="int4"),
    "awq": Variant("AWQ", "awq"),
    "awq-and-int8": Variant("AWQ with `--quantization int8`", "awq", "int8"),
    "gptq": Variant("GPTQ, 4 bits", "gptq"),
    "gptq-act-order": Variant("GPTQ, 4 bits, `desc_act`", "gptq-act-order"),
    "gptq-int8": Variant("GPTQ, 8 bits in groups", "gptq-int8"),
    "compressed-int4": Variant("compressed-tensors, 4 bits", "int4"),
    "compressed-int8": Variant("compressed-tensors, 8 bits", "int8"),
    "compressed-fp8": Variant("compressed-tensors, FP8", "fp8-output"),
    "fp8": Variant("FP8 of Qwen", "fp8-block"),
    "fp8-and-int8": Variant("FP8 of Qwen with `--quantization int8`", "fp8-block", "int8"),
}
"""The rows after the one of the unquantized model. Rows with the same layout follow each other."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What loading a model took.

    Attributes:
        seconds: the time, with the file in the page cache.
        num_bytes: growth of the resident memory, without mapped files.
    """

    seconds: float
    num_bytes: int


class ModelProcess:
    """A model in its own process.

    Attributes:
        loaded: what loading it took.
    """

    def __init__(self, folder: Path, quantization: Literal["none", "int4", "int8"] = "none") -> None:
        config = EngineConfig(
            model=str(folder),
            quantization=quantization,
            device="cpu",
            max_model_len=2 * PROMPT_TOKENS,
            max_batch_size=max(SEQUENCES),
        )
        context = multiprocessing.get_context("spawn")
        self._connection, connection = context.Pipe()
        self._process = context.Process(target=_serve, args=(connection, config), daemon=True)
        self._process.start()
        connection.close()
        self.loaded: Loaded = self._connection.recv()

    def step_seconds(self, sequences: int) -> float:
        """Return the time of the fastest of `STEPS` decode steps."""
        self._connection.send(sequences)
        seconds: float = self._connection.recv()
        return seconds

    def close(self) -> None:
        """End the process."""
        self._connection.send(0)
        self._process.join()


def _serve(connection: Connection, config: EngineConfig) -> None:
    asyncio.run(_measure(connection, config))


async def _measure(connection: Connection, config: EngineConfig) -> None:
    registry, folder = load_plugins(), Path(config.model)
    spec = registry.load_spec(folder)
    kernels = KernelSelector(registry.kernels.values(), config)
    decoder = TorchDecoder(spec, config, kernels)
    before, begin = resident_bytes(os.getpid()), time.perf_counter()
    encoder = registry.family_of(folder).load_vision_encoder(spec, config, kernels)
    await decoder.start()
    loaded = Loaded(seconds=time.perf_counter() - begin, num_bytes=resident_bytes(os.getpid()) - before)
    runner = decoder._worker._runner  # noqa: SLF001 - the step is not part of the interface
    steps = {
        count: chunks(spec, [None] * count, runner, prefill=False, prompt_tokens=PROMPT_TOKENS) for count in SEQUENCES
    }
    connection.send(loaded)
    while count := connection.recv():
        seconds = []
        for _ in range(STEPS):
            begin = time.perf_counter()
            runner.executor.run(lambda step=steps[count]: runner.step(step))
            seconds.append(time.perf_counter() - begin)
        connection.send(min(seconds))
    await decoder.close()
    del encoder  # its memory was counted


def rows(source: Path, variants: Sequence[Variant], rounds: int) -> Iterator[str]:
    """Measure the unquantized model and the variants, and yield the lines of the table."""
    with closing(_load(source)) as base, tempfile.TemporaryDirectory() as scratch:
        # The first steps after loading are slower: the system collapses memory into huge pages at the same time.
        times = [1000 * min(base.step_seconds(count) for _ in range(rounds)) for count in SEQUENCES]
        yield "| | File | Memory | Load | Step, 1 sequence | Step, 8 sequences |\n|---|---|---|---|---|---|"
        yield _row("bfloat16", source, base.loaded, [f"1 ({milliseconds:.1f} ms)" for milliseconds in times])
        for name, group in itertools.groupby(variants, key=lambda variant: variant.layout):
            folder = source
            if name is not None:
                folder = Path(scratch) / name
                write_quantized_model(source, LAYOUTS[name], folder)
            for variant in group:
                with closing(_load(folder, variant.quantization)) as other:
                    ratios = [f"{_ratio(other, base, count, rounds):.2f}" for count in SEQUENCES]
                    yield _row(variant.title, folder, other.loaded, ratios)
            if name is not None:
                shutil.rmtree(folder)


def _load(folder: Path, quantization: Literal["none", "int4", "int8"] = "none") -> ModelProcess:
    with (folder / SINGLE).open("rb") as file:  # into the page cache
        while file.read(1 << 24):
            pass
    return ModelProcess(folder, quantization)


def _ratio(model: ModelProcess, base: ModelProcess, sequences: int, rounds: int) -> float:
    """Return the median of the ratios of the times of a step."""
    return statistics.median(model.step_seconds(sequences) / base.step_seconds(sequences) for _ in range(rounds))


def _row(title: str, folder: Path, loaded: Loaded, steps: Sequence[str]) -> str:
    sizes = [f"{size / 1e6:,.0f} MB" for size in ((folder / SINGLE).stat().st_size, loaded.num_bytes)]
    return f"| {' | '.join([title, *sizes, f'{loaded.seconds:.2f} s', *steps])} |"


def _chosen(_context: click.Context, _param: click.Parameter, value: str) -> list[Variant]:
    names = value.split(",")
    if unknown := [name for name in names if name not in VARIANTS]:
        raise click.BadParameter(f"unknown: {', '.join(unknown)}; choose from {', '.join(VARIANTS)}")
    return [variant for name, variant in VARIANTS.items() if name in names]


@click.command(help=__doc__, context_settings={"max_content_width": 100})
@click.option("--model", default="small", show_default=True)
@click.option("--variants", default=",".join(VARIANTS), callback=_chosen, help="By default, all.")
@click.option("--rounds", default=7, show_default=True)
def main(model: str, variants: list[Variant], rounds: int) -> None:
    source = checkpoint(model)
    if not (source / SINGLE).exists():
        raise click.BadParameter(f"{source} has no {SINGLE}. Use a model with a single file.", param_hint="--model")
    for line in rows(source, variants, rounds):
        click.echo(line)


if __name__ == "__main__":
    main()
