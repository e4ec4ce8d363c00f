"""Measure how many images, texts and pages per second each engine embeds on this machine, and its memory.

    python -m benchmarks.pooling [--models small,qwen3-vl-2b] [--engines ours,vllm] [--workloads images,pages] [--quick]

Images have 224 x 224 pixels, texts 1,000 tokens, pages 1,240 x 1,754 pixels, which are not scaled down. All inputs of a
workload are sent at once, each in a request to `/v1/embeddings`, with the same instruction; all engines have the same
prompts. Only one engine is loaded at a time, so that its memory is measured; in each round, the engines run in random
order, and are compared with the first one. The limit is the number of floating-point operations divided by the rate of
large bfloat16 products. The models have the shapes of published checkpoints and random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from .engines import Server
from .environments import OtherEngines
from .limits import measure_rates
from .pooling_engines import DEFAULT, ENGINES, embedding_checkpoint, embedding_launch
from .pooling_load import MAX_PIXELS, WORKLOADS, Embedded, embed
from .pooling_table import Table
from .report import LIMIT
from .rounds import add_options, describe, names_of, reporting, run_round, say


def main(arguments: Sequence[str] | None = None) -> Table:
    options = _parser().parse_args(arguments)
    models = [embedding_checkpoint(name, options.model_folder) for name in options.models.split(",")]
    table = Table(base=options.engines[0])
    with reporting(table, options.json):
        for model in models:
            for number in range(options.rounds):
                _round(model, number, options, table)
    return table


def _round(model: Path, number: int, options: argparse.Namespace, table: Table) -> None:
    gflop_s = measure_rates().bf16_gflop_s
    measure = partial(_measure, model=model, number=number, options=options, table=table)
    found = run_round(model.name, number, options.engines, table.note, measure)
    for name, results in found.items():
        for workload, embedded in results.items():
            table.rates[model.name, name, workload][number] = embedded.items_per_second
            base = found.get(table.base, {}).get(workload)
            if base and name != table.base:
                table.add_agreement((model.name, name, workload), embedded.agreement(base))
            if embedded.prompt_tokens:
                flop = WORKLOADS[workload].flop(model, embedded.prompt_tokens)
                table.rates[model.name, LIMIT, workload][number] = 1e9 * gflop_s / flop


def _measure(name: str, *, model: Path, number: int, options: argparse.Namespace, table: Table) -> dict[str, Embedded]:
    """Start an engine, compute the embeddings of the workloads, and stop it; what fails is noted."""
    launch = embedding_launch(name, model, OtherEngines(options.other_engines.expanduser()), MAX_PIXELS)
    if launch.note:
        table.note(f"{name}: {launch.note}")
    results: dict[str, Embedded] = {}
    server = Server(launch, options.logs / f"{model.name}-{name}.log")
    try:
        time.sleep(options.settle)
        for workload in options.workloads:
            load = WORKLOADS[workload]
            count = load.quick if options.quick else load.count
            try:
                asyncio.run(embed(server.base, load.bodies(f"warm {number} {workload}", 1)))
                results[workload] = asyncio.run(embed(server.base, load.bodies(f"{number} {workload}", count)))
            except RuntimeError as error:
                table.note(f"{model.name}, {name}, {workload}: {describe(error)}")
                continue
            say(f"  {workload}: {results[workload].items_per_second:.3g} per s")
        peak = server.peak_bytes()
    finally:
        server.stop()
    table.peaks[model.name, name] = max(peak, table.peaks.get((model.name, name), 0))
    return results


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, models="small,qwen3-vl-2b", engines=ENGINES, default=DEFAULT)
    parser.add_argument("--workloads", type=names_of(WORKLOADS), default=",".join(WORKLOADS), help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer inputs, to check that everything works")
    return parser


if __name__ == "__main__":
    main()
