"""Conversations about images over replicas of Ray Serve, by routing: passes of the vision encoder, and throughput.

    python -m benchmarks.ray_routing [--model small] [--modes content,round-robin,store] [--rounds 1]

Needs the extra `ray`. Each mode starts an application; `store` is round robin with an embedding store in a folder. All
replicas share this machine, each with one thread, so that figures show the work that routing saves, and not what more
machines would add.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import httpx

from .client import load
from .engines import START_SECONDS, Launch, Server, end_with_us
from .environments import OtherEngines
from .models import checkpoint
from .workloads import chat, fresh

REPORT_SECONDS = 6.0
"""Seconds until the metrics of all replicas are current: they report every five."""

MODES: Mapping[str, tuple[str, ...]] = {
    "content": ("routing=content",),
    "round-robin": ("routing=round-robin",),
    "store": ("routing=round-robin", "embedding_store=file://{folder}/store"),
}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What all modes have in common.

    Attributes:
        model: the folder of the checkpoint.
        replicas: number of replicas.
        images: number of conversations, each about its own image.
        turns: requests of each conversation.
        tokens: completion tokens of each request.
    """

    model: Path
    replicas: int
    images: int
    turns: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One round of one mode.

    Attributes:
        passes: images that were encoded.
        throughput: requests per second.
        ttft: median seconds until the first token.
    """

    passes: int
    throughput: float
    ttft: float


def run_mode(cluster: Cluster, mode: str, seed: int) -> Outcome:
    """Start an application, and measure it with new conversations."""
    # Ray's sockets are in the folder, and the length of their paths is limited.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        server = Server(_launch(cluster, mode, folder), Path(folder, "log"))
        try:
            _wait_for_replicas(server, cluster.replicas)
            return asyncio.run(_measure(server, cluster, Random(seed)))
        finally:
            server.stop()


def _launch(cluster: Cluster, mode: str, folder: str) -> Launch:
    options = [f"model={cluster.model}", f"min_replicas={cluster.replicas}"]
    options += [option.format(folder=folder) for option in MODES[mode]]
    return Launch(
        name=mode, command=(sys.executable, str(OtherEngines.script("ray_server.py")), "{port}", folder, *options)
    )


def _wait_for_replicas(server: Server, count: int) -> None:
    """Wait until all replicas have reported their metrics.

    Raises:
        RuntimeError: that takes too long.
    """
    end = time.monotonic() + START_SECONDS
    while len(set(re.findall(r'replica="([^"]+)"', _metrics(server)))) < count:
        if time.monotonic() > end:
            raise RuntimeError(f"not all replicas reported within {START_SECONDS:.0f} s: {server.log_tail()}")
        time.sleep(0.5)


async def _measure(server: Server, cluster: Cluster, source: Random) -> Outcome:
    async with server.target() as target:
        warm_up = fresh(cluster.tokens, side=112)(source, 4 * cluster.replicas)
        await load(target, warm_up, users=cluster.replicas)
        talks = chat(cluster.tokens, cluster.turns)(source, cluster.images)
        before, begin = _encoded(server), time.perf_counter()
        samples = await load(target, talks, users=cluster.images)
        seconds = time.perf_counter() - begin
    if faults := [sample.fault for sample in samples if sample.fault]:
        raise RuntimeError(f"{len(faults)} of {len(samples)} requests failed: {faults[0]}")
    return Outcome(
        passes=_encoded(server) - before,
        throughput=len(samples) / seconds,
        ttft=statistics.median(sample.ttft for sample in samples),
    )


def _encoded(server: Server) -> int:
    """Return the number of images that all replicas have encoded, once they have reported it."""
    time.sleep(REPORT_SECONDS)
    counts = re.findall(
        r"^dashinfer_vlm_vision_batch_size_sum\{.*replica=.*\} ([\d.e+]+)$", _metrics(server), re.MULTILINE
    )
    return round(sum(map(float, counts)))


def _metrics(server: Server) -> str:
    return httpx.get(server.base.replace("/v1", "/metrics"), trust_env=False, timeout=60).text


def table(outcomes: Mapping[str, Sequence[Outcome]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown: the passes of each round, and medians of the rounds."""
    yield "| Routing | Passes | Requests/s | TTFT, s |"
    yield "|---|---|---|---|"
    for mode, rounds in outcomes.items():
        passes = ", ".join(str(outcome.passes) for outcome in rounds)
        throughput = statistics.median(outcome.throughput for outcome in rounds)
        ttft = statistics.median(outcome.ttft for outcome in rounds)
        yield f"| {mode} | {passes} | {throughput:.2f} | {ttft:.2f} |"


def main(arguments: Sequence[str] | None = None) -> Mapping[str, Sequence[Outcome]]:
    """Run the command line, print the table, and return what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="small", help="a model of benchmarks.models, or a checkpoint (%(default)s)")
    parser.add_argument("--modes", default=",".join(MODES), help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="of the images; rounds continue from it")
    given = parser.parse_args(arguments)
    modes = given.modes.split(",")
    if unknown := set(modes) - set(MODES):
        parser.error(f"--modes: {', '.join(unknown)} is not one of {', '.join(MODES)}")
    cluster = Cluster(
        model=checkpoint(given.model),
        replicas=given.replicas,
        images=given.images,
        turns=given.turns,
        tokens=given.tokens,
    )
    outcomes: dict[str, list[Outcome]] = {mode: [] for mode in modes}
    with end_with_us():
        for seed in range(given.seed, given.seed + given.rounds):
            for mode in modes:
                outcomes[mode].append(run_mode(cluster, mode, seed))
                print(f"{mode}: {outcomes[mode][-1]}", flush=True)
    print("\n".join(table(outcomes)))
    return outcomes


if __name__ == "__main__":
    main()
