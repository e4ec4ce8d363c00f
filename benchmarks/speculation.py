"""The cost and the gain of several tokens per step.

    python -m benchmarks.speculation [--model small|2b|demo|FOLDER] [--rounds 5] [any option of dashinfer-vlm serve]

First the time of a step by its number of rows, which is the cost of a draft. Then completions with
`--speculative-method ngram` as a share of the time with `none`, alternating in each round. A model with random weights
does not copy by itself. Therefore a grammar leaves it one choice per token where it has to copy, without reporting that
these tokens are forced: each one is drafted and verified.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import click
import numpy as np
import numpy.typing as npt

from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.cli.command import EngineCommand
from dashinfer_vlm_core.decoders import DecodeRequest, Sampling
from dashinfer_vlm_core.kernels.choice import KernelSelector
from dashinfer_vlm_core.models.spec import ModelSpec
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_torch.decoder import TorchDecoder
from dashinfer_vlm_torch.proposer import Draft
from dashinfer_vlm_torch.scheduler import Scheduler
from dashinfer_vlm_torch.sequence import SequenceState

from .models import checkpoint

ROWS = (1, 2, 4, 8, 9, 12, 16, 32)
PROMPT_TOKENS = 400
COPIED = 200


@dataclass(frozen=True)
class ScriptedMatcher:
    """Allows one output, token by token; implements `GrammarMatcher`."""

    script: Sequence[int]
    vocab_size: int
    accepted: list[int]

    def copy(self) -> ScriptedMatcher:
        return ScriptedMatcher(self.script, self.vocab_size, list(self.accepted))

    def allowed_tokens(self) -> npt.NDArray[np.bool_]:
        mask = np.zeros(self.vocab_size, np.bool_)
        mask[self.script[len(self.accepted)]] = True
        return mask

    def accept_token(self, token: int) -> None:
        self.accepted.append(token)

    def forced_tokens(self) -> list[int]:
        return []

    def count_allowed(self, tokens: Sequence[int]) -> int:
        return len(tokens)  # as if there were no grammar: wrong drafts are computed


def request(token_ids: Sequence[int], grammar: ScriptedMatcher | None = None, **sampling: float) -> DecodeRequest:
    return DecodeRequest(
        id="benchmark",
        token_ids=np.array(token_ids, np.int64),
        positions=np.tile(np.arange(len(token_ids)), (3, 1)),
        sampling=Sampling(**{"max_tokens": COPIED, "ignore_eos": True, "temperature": 0, **sampling}),  # type: ignore[arg-type]
        grammar=grammar,
    )


def ordinary(source: random.Random, spec: ModelSpec) -> DecodeRequest:
    """Random tokens, sampled from a nearly uniform distribution: no n-gram repeats."""
    return request(prompt(source, spec), temperature=1.0, seed=source.randrange(1 << 40))


def confusing(source: random.Random, spec: ModelSpec) -> DecodeRequest:
    """Prompt and output of 30 random words: nearly every pair has occurred before, and continues differently."""
    words = [source.randrange(spec.vocab_size // 2) for _ in range(30)]
    script = source.choices(words, k=COPIED)
    grammar = ScriptedMatcher(script, spec.vocab_size, [])
    return request(source.choices(words, k=PROMPT_TOKENS), grammar)


def copying(source: random.Random, spec: ModelSpec) -> DecodeRequest:
    """An answer that copies 200 tokens of the prompt."""
    tokens = prompt(source, spec)
    return request(tokens, ScriptedMatcher(tokens[100 : 100 + COPIED], spec.vocab_size, []))


def greedy(source: random.Random, spec: ModelSpec) -> DecodeRequest:
    """The model's own greedy output, which repeats itself if the weights are random."""
    return request(prompt(source, spec))


def prompt(source: random.Random, spec: ModelSpec) -> list[int]:
    return [source.randrange(spec.vocab_size // 2) for _ in range(PROMPT_TOKENS)]


WORKLOADS = {
    "ordinary text, 1 user": (ordinary, 1),
    "ordinary text, 8 users": (ordinary, 8),
    "misleading repetitions, 1 user": (confusing, 1),
    "misleading repetitions, 8 users": (confusing, 8),
    "copies 200 tokens, 1 user": (copying, 1),
    "copies 200 tokens, 8 users": (copying, 8),
    "greedy output, 1 user": (greedy, 1),
}


def step_times(decoder: TorchDecoder, source: random.Random, spec: ModelSpec, rounds: int) -> dict[int, float]:
    """Return the minimum seconds of a greedy step of one sequence by its number of rows."""
    runner = decoder._worker._runner  # noqa: SLF001 - the step is not part of the interface
    scheduler = Scheduler(kv_tokens=1024, max_batch_size=1, max_waiting=1, prefill_chunk=512)
    sequence = SequenceState(greedy(source, spec), ())
    scheduler.add(sequence)
    (chunk,) = scheduler.schedule().chunks
    scheduler.update([chunk], runner.executor.run(lambda: runner.step([chunk])))
    (chunk,) = scheduler.schedule().chunks
    seconds: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(10 * rounds):
        for rows in ROWS:
            drafted = chunk._replace(draft=Draft(tuple(prompt(source, spec)[: rows - 1])))
            begin = time.perf_counter()
            runner.executor.run(lambda drafted=drafted: runner.step([drafted]))
            seconds[rows].append(time.perf_counter() - begin)
    return {rows: min(values) for rows, values in seconds.items()}


async def timed(decoder: TorchDecoder, requests: Sequence[DecodeRequest]) -> tuple[float, list[list[int]]]:
    """Return the seconds of decoding all requests after their prefill, and the outputs."""
    started: list[float] = []

    async def output(one: DecodeRequest) -> list[int]:
        ids = []
        async for token in decoder.decode(one):
            if not ids:
                started.append(time.perf_counter())
            ids.append(token.id)
        return ids

    outputs = await asyncio.gather(*map(output, requests))
    return time.perf_counter() - max(started), outputs


@contextlib.asynccontextmanager
async def started(config: EngineConfig, spec: ModelSpec, *methods: str) -> AsyncIterator[dict[str, TorchDecoder]]:
    """Start a decoder for each method of speculation."""
    async with contextlib.AsyncExitStack() as stack:
        decoders = {}
        for method in methods:
            options = config.model_copy(update={"speculative_method": method})
            kernels = KernelSelector(load_plugins().kernels.values(), options)
            decoders[method] = TorchDecoder(spec, options, kernels)
            await decoders[method].start()
            stack.push_async_callback(decoders[method].close)
        yield decoders


async def compare(config: EngineConfig, spec: ModelSpec, rounds: int, names: Sequence[str]) -> None:
    source = random.Random("speculation")
    async with started(config, spec, "none", "ngram") as decoders:
        times = step_times(decoders["none"], source, spec, rounds)
        print("| rows | ms per step | ratio |\n|---|---|---|")
        for rows, seconds in times.items():
            print(f"| {rows} | {1000 * seconds:.2f} | {seconds / times[1]:.2f} |", flush=True)
        print("\n| workload | none, s | ngram / none | accepted / drafted | steps | equal |\n|---|---|---|---|---|---|")
        for name in names:
            await report(name, decoders, source, spec, rounds)


async def report(
    name: str, decoders: dict[str, TorchDecoder], source: random.Random, spec: ModelSpec, rounds: int
) -> None:
    make, users = WORKLOADS[name]
    ratios, baseline, equal = list[float](), list[float](), 0
    before = {method: decoder.snapshot() for method, decoder in decoders.items()}
    for number in range(rounds):
        requests = [make(source, spec) for _ in range(users)]
        seconds, outputs = {}, {}
        for method in sorted(decoders, reverse=number % 2 == 0):
            seconds[method], outputs[method] = await timed(decoders[method], requests)
        equal += outputs["none"] == outputs["ngram"]
        ratios.append(seconds["ngram"] / seconds["none"])
        baseline.append(seconds["none"])
    after = {method: decoder.snapshot() for method, decoder in decoders.items()}
    drafted = after["ngram"].draft_tokens - before["ngram"].draft_tokens
    accepted = after["ngram"].accepted_tokens - before["ngram"].accepted_tokens
    steps = {method: after[method].steps - before[method].steps for method in decoders}
    print(
        f"| {name} | {statistics.median(baseline):.2f} | {statistics.median(ratios):.3f} ({min(ratios):.3f} to"
        f" {max(ratios):.3f}) | {accepted} / {drafted} | {steps['ngram'] / steps['none']:.2f} |"
        f" {equal} of {rounds} |",
        flush=True,
    )


@click.command(cls=EngineCommand, help=__doc__, context_settings={"max_content_width": 100})
@click.option("--rounds", default=5, show_default=True)
@click.option("--workload", "names", multiple=True, type=click.Choice(list(WORKLOADS)), help="Default: all.")
def main(rounds: int, names: tuple[str, ...], config: EngineConfig) -> None:
    spec = load_plugins().load_spec(checkpoint(config.model))
    asyncio.run(compare(config, spec, rounds, names or list(WORKLOADS)))


if __name__ == "__main__":
    main()
