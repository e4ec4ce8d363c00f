"""What it costs to serve two models in one process: their speed, the time to swap them, and pauses while one loads.

    python -m benchmarks.several_models [--model small] [--rounds 3]

Both have the same checkpoint, so that one's speed is comparable to the other's. Three servers run in turn, and the
others are stopped: with one model, with both loaded, and with a memory limit that holds one. A round takes a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import aiohttp

from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.engine.managed_models import estimate_bytes

from .client import HTTPTarget, Sample, Talk, load
from .engines import Server, end_with_us, ours
from .models import checkpoint
from .workloads import words

FIRST = "first"
SECOND = "second"
PROMPT_TOKENS = 128
TOKENS = 64
STREAM_TOKENS = 1600
"""Long enough that another model loads during the stream."""
USERS = (1, 8)
KV_MIB = 512
OPTIONS = ("--kv-cache-mib", str(KV_MIB), "--speculative-method", "none")
"""Random weights repeat themselves, so that the number of accepted drafts would vary."""
PAUSE_SECONDS = 1.0
"""Before the other model begins to load."""


class Speed(NamedTuple):
    """Medians: seconds to the first token and per further token, and tokens per second of all users."""

    first: float
    further: float
    rate: float


def talk(source: random.Random, tokens: int) -> Talk:
    return Talk(turns=(words(source, PROMPT_TOKENS),), tokens=tokens)


async def ask(target: HTTPTarget, source: random.Random, *, users: int = 1, tokens: int = TOKENS) -> list[Sample]:
    """Return the responses of `users` concurrent requests.

    Raises:
        RuntimeError: one failed.
    """
    samples = await load(target, [talk(source, tokens) for _ in range(users)], users=users)
    for sample in samples:
        if sample.fault:
            raise RuntimeError(sample.fault)
    return samples


async def speed(target: HTTPTarget, source: random.Random, users: int) -> Speed:
    samples = await ask(target, source, users=users)
    seconds = max(each.arrivals[-1] for each in samples) - min(each.sent for each in samples)
    firsts, further = [each.ttft for each in samples], [each.tpot for each in samples]
    return Speed(statistics.median(firsts), statistics.median(further), users * TOKENS / seconds)


@contextlib.contextmanager
def running(server: Server) -> Iterator[None]:
    """Let a server run that is stopped otherwise."""
    server.resume()
    try:
        yield
    finally:
        server.pause()


@contextlib.asynccontextmanager
async def both(server: Server) -> AsyncIterator[tuple[HTTPTarget, HTTPTarget]]:
    async with server.target(FIRST) as first, server.target(SECOND) as second:
        yield first, second


async def compare_speed(one: Server, two: Server, rounds: int, source: random.Random) -> list[str]:
    """Return a table of the server with both models relative to that with one; a first round warms up."""
    ratios: dict[int, list[Speed]] = {users: [] for users in USERS}
    async with one.target(FIRST) as alone, two.target(FIRST) as together:
        for number in range(-1, rounds):
            for users in USERS:
                seed = source.random()  # both get the same prompts
                with running(one):
                    expected = await speed(alone, random.Random(seed), users)
                with running(two):
                    found = await speed(together, random.Random(seed), users)
                if number >= 0:
                    ratios[users].append(Speed(*(a / b for a, b in zip(found, expected, strict=True))))
    lines = ["| both loaded, to one alone | first token | further tokens | tokens/s |", "|---|---|---|---|"]
    for users, values in ratios.items():
        medians = [f"{statistics.median(column):.3f}" for column in zip(*values, strict=True)]
        lines.append(f"| users: {users} | {' | '.join(medians)} |")
    return lines


async def swap_seconds(limited: Server, rounds: int, source: random.Random) -> list[float]:
    """Return the seconds to the first token of requests whose model is not loaded, less those of a loaded one."""
    seconds = []
    with running(limited):
        async with both(limited) as targets:
            await ask(targets[0], source)
            for number in range(2 * rounds):
                target = targets[1 - number % 2]
                (swapped,) = await ask(target, source)
                (loaded,) = await ask(target, source)
                seconds.append(swapped.ttft - loaded.ttft)
    return seconds


async def longest_gaps(two: Server, rounds: int, source: random.Random) -> list[tuple[float, float]]:
    """Return the longest gaps of streams while nothing loads and while the other model loads, in seconds."""
    found = []
    with running(two):
        async with two.target(FIRST) as target, aiohttp.ClientSession() as admin:
            for _ in range(rounds):
                (quiet,) = await ask(target, source, tokens=STREAM_TOKENS)
                await (await admin.post(f"{two.base}/models/unload", json={"model": SECOND})).read()
                await asyncio.sleep(PAUSE_SECONDS)
                stream = asyncio.create_task(ask(target, source, tokens=STREAM_TOKENS))
                await asyncio.sleep(PAUSE_SECONDS)
                async with admin.post(f"{two.base}/models/load", json={"model": SECOND}) as response:
                    response.raise_for_status()
                is_loaded = not stream.done()
                (busy,) = await stream
                if not is_loaded:
                    raise RuntimeError("the stream ended before the model was loaded")
                found.append((max(quiet.gaps), max(busy.gaps)))
    return found


async def measure(one: Server, two: Server, limited: Callable[[], Server], rounds: int) -> None:
    """Print the results when they are ready; `limited` starts the server with a memory limit."""
    source = random.Random("several models")
    print("\n".join(await compare_speed(one, two, rounds, source)), end="\n\n", flush=True)
    gaps = await longest_gaps(two, rounds, source)
    quiet, busy = (1000 * statistics.median(column) for column in zip(*gaps, strict=True))
    print(f"Longest gap of a stream: {quiet:.0f} ms; while the other model loads {busy:.0f} ms ({busy / quiet:.2f}).")
    swaps = await swap_seconds(limited(), rounds, source)
    print(f"Swap: {statistics.median(swaps):.2f} s ({min(swaps):.2f} to {max(swaps):.2f}).")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="small", help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments)
    model = checkpoint(given.model)
    with end_with_us(), tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:

        def start(name: str, *options: str) -> Server:
            launch = ours(name, f"{FIRST}={model}", *OPTIONS, *options)
            server = Server(launch, Path(folder) / f"{name}.log")
            stack.callback(server.stop)
            server.pause()
            return server

        second = ("--model", f"{SECOND}={model}")
        servers = start("one"), start("two", *second, "--allow-model-management")
        limit = ("--memory-limit", str(estimate_bytes(EngineConfig(model=str(model), kv_cache_mib=KV_MIB)) * 3 // 2))
        asyncio.run(measure(*servers, lambda: start("limited", *second, *limit), given.rounds))


if __name__ == "__main__":
    main()
