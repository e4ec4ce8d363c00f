"""How much faster this engine is on more cores.

    python -m benchmarks.scaling [--model small] [--rounds 3] [any option of dashinfer-vlm serve]

A server runs on 1, 2, 4, ... and all physical cores that this process may use, one after the other in each round, while
the others are stopped. Efficiency is the time on one core divided by the number of cores and the time on them. The
client shares the cores with a server that uses all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dashinfer_vlm_core.kernels.devices import cpu_model
from dashinfer_vlm_core.kernels.threads import Machine

from .client import Sample, Talk, Target, load
from .engines import Server, end_with_us, ours
from .models import checkpoint
from .workloads import fresh, words

PROMPT_TOKENS = 8
TOKENS = 64
SEQUENCES = (1, 8, 32)
USERS = 16
OPTIONS = ("--kv-cache-mib", "512", "--speculative-method", "none")
"""Random weights repeat themselves, so that the number of accepted drafts would vary."""


class Sizes(NamedTuple):
    """What is measured: the tokens of a response, concurrent sequences of decode steps, and users with new images."""

    tokens: int = TOKENS
    sequences: Sequence[int] = SEQUENCES
    users: int = USERS


DEFAULT_SIZES = Sizes()


def core_counts(cores: int) -> list[int]:
    """Return 1, 2, 4, ... and the number of all cores."""
    return sorted({cores, *(1 << power for power in range(cores.bit_length()) if 1 << power <= cores)})


async def measure(target: Target, seed: str, sizes: Sizes = DEFAULT_SIZES) -> dict[str, float]:
    """Return the seconds of each phase: to the first token of a new image, of a decode step, and of a request.

    Raises:
        RuntimeError: a request failed.
    """
    source = random.Random(seed)
    (alone,) = await _ask(target, fresh(1)(source, 1), 1)
    found = {"first token, new image": alone.ttft}
    for count in sizes.sequences:
        talks = [Talk(turns=(words(source, PROMPT_TOKENS),), tokens=sizes.tokens) for _ in range(count)]
        samples = await _ask(target, talks, count)
        found[f"decode step, sequences: {count}"] = statistics.median(each.tpot for each in samples)
    begin = time.perf_counter()
    await _ask(target, fresh(sizes.tokens)(source, sizes.users), sizes.users)
    found[f"request, users with new images: {sizes.users}"] = (time.perf_counter() - begin) / sizes.users
    return found


async def _ask(target: Target, talks: Sequence[Talk], users: int) -> list[Sample]:
    samples = await load(target, talks, users=users)
    for sample in samples:
        if sample.fault:
            raise RuntimeError(sample.fault)
    return samples


def table(seconds: Mapping[int, Sequence[Mapping[str, float]]]) -> Iterator[str]:
    """Yield a table of the median seconds and of the median efficiency by phase and number of cores.

    Args:
        seconds: the rounds of each number of cores, which begins with one core.
    """
    yield f"| phase | {' | '.join(f'{count} cores: ms | efficiency' for count in seconds)} |"
    yield f"|---|{'---|---|' * len(seconds)}"
    for phase in seconds[1][0]:
        cells = []
        for count, rounds in seconds.items():
            pairs = zip(seconds[1], rounds, strict=True)
            efficiency = statistics.median(one[phase] / (count * many[phase]) for one, many in pairs)
            cells += [f"{1e3 * statistics.median(each[phase] for each in rounds):.1f}", f"{efficiency:.2f}"]
        yield f"| {phase} | {' | '.join(cells)} |"


async def compare(servers: Mapping[int, Server], rounds: int) -> dict[int, list[dict[str, float]]]:
    """Measure the servers in turn, after a round that warms them up."""
    found: dict[int, list[dict[str, float]]] = {count: [] for count in servers}
    for number in range(-1, rounds):
        for count, server in servers.items():
            server.resume()
            async with server.target() as target:
                seconds = await measure(target, f"{number}")
            server.pause()
            if number >= 0:
                found[count].append(seconds)
    return found


def start(model: Path, count: int, options: Sequence[str], folder: Path) -> Server:
    """Start a server that may use the first CPU of each of `count` cores."""
    allowed = os.sched_getaffinity(0)
    cpus = Machine.read().cpus(count)
    os.sched_setaffinity(0, cpus)
    try:
        launch = ours(f"{count} cores", str(model), *OPTIONS, "--cpu-threads", str(count), *options)
        return Server(launch, folder / f"{count}.log")
    finally:
        os.sched_setaffinity(0, allowed)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="small", help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    given, options = parser.parse_known_args(arguments)
    model = checkpoint(given.model)
    machine = Machine.read()
    counts = core_counts(machine.limit(len(machine.fast_cores())))
    with end_with_us(), tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        servers = {}
        for count in counts:
            servers[count] = start(model, count, options, Path(folder))
            stack.callback(servers[count].stop)
            servers[count].pause()
        seconds = asyncio.run(compare(servers, given.rounds))
    print(f"{' '.join([model.name, *options])} on {cpu_model()}, medians of {given.rounds} rounds\n")
    print("\n".join(table(seconds)))


if __name__ == "__main__":
    main()
