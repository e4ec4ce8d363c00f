"""The memory of the server, its speed and the hits of its caches over a day of a camera: a request for each second.

    python -m benchmarks.camera_day [--requests 8640] [--seconds 4] [any option of dashinfer-vlm serve]

Requests are those of `examples/camera`, with its simulated frames, one after the other without waiting: 86,400 are a
day. Memory grows until the caches are full: give them a size that the first tenth fills.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import click
import httpx

from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.cli.command import EngineCommand
from examples.camera.camera import Second, request, seconds_of, simulated_frames

from .attacks import MIB
from .engines import START_SECONDS, Server, configured, end_with_us

QUESTION = "Which way does the circle move?"
PARTS = 10
LOGS = Path(__file__).parent / "results" / "logs"
COUNTERS = ("mm_cache_hits", "mm_cache_queries", "cached_prompt_tokens", "prompt_tokens")


class Figures(NamedTuple):
    """What a tenth of the requests shows: memory in MiB at its end, requests per second, and ratios of hits."""

    memory: float
    rate: float
    frame_pairs: float
    tokens: float


def measure(server: Server, requests: int, seconds: int) -> Iterator[Figures]:
    """Send the requests to a server, and yield the figures of each tenth.

    Raises:
        httpx.HTTPStatusError: a request fails.
    """
    pairs = seconds_of(simulated_frames(requests))
    window: deque[Second] = deque(maxlen=seconds)
    with httpx.Client(base_url=server.base.removesuffix("/v1"), trust_env=False, timeout=START_SECONDS) as client:
        before = counters(client)
        for part in range(PARTS):
            count = (part + 1) * requests // PARTS - part * requests // PARTS
            begin = time.perf_counter()
            for pair in islice(pairs, count):
                window.append(pair)
                client.post("/v1/chat/completions", json=request(window, QUESTION)).raise_for_status()
            elapsed = time.perf_counter() - begin
            after = counters(client)
            hits, queries, cached, tokens = (after[name] - before[name] for name in COUNTERS)
            pairs_share = hits / max(1, queries)
            yield Figures(server.resident_bytes() / MIB, count / elapsed, pairs_share, cached / max(1, tokens))
            before = after


def counters(client: httpx.Client) -> dict[str, float]:
    """Return the values of `COUNTERS`."""
    text = client.get("/metrics").raise_for_status().text
    found = dict(re.findall(r"^dashinfer_vlm_(\w+)_total (\S+)$", text, re.MULTILINE))
    return {name: float(found[name]) for name in COUNTERS}


@click.command(cls=EngineCommand, help=__doc__)
@click.option("--requests", type=click.IntRange(PARTS), default=8640, show_default=True)
@click.option("--seconds", type=click.IntRange(1), default=4, show_default=True, help="Of the window.")
@click.option("--logs", type=click.Path(path_type=Path), default=LOGS, help="Folder for the output of the server.")
def main(*, requests: int, seconds: int, logs: Path, config: EngineConfig) -> None:
    memory = []
    with end_with_us():
        server = Server(configured("camera-day", config, logs), logs / "camera-day.log")
        try:
            print("| tenth | memory, MiB | requests per second | frame pairs cached | prompt tokens cached |")
            print("|---|---|---|---|---|")
            for number, figures in enumerate(measure(server, requests, seconds), 1):
                memory.append(figures.memory)
                print(
                    f"| {number} | {figures.memory:.1f} | {figures.rate:.1f} | {figures.frame_pairs:.0%}"
                    f" | {figures.tokens:.0%} |",
                    flush=True,
                )
        finally:
            server.stop()
    first, last = memory[0], memory[-1]
    print(f"Memory: first tenth {first:.1f} MiB, last tenth {last:.1f} MiB, growth {last - first:.1f} MiB")


if __name__ == "__main__":
    main()
