"""The workloads and their metrics."""

from __future__ import annotations

import asyncio
import base64
import io
import random
import statistics
import time
from asyncio import FIRST_COMPLETED
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from .client import Content, Sample, Talk, Target, load

Make = Callable[[random.Random, int], list[Talk]]
"""Makes a number of conversations from a source of random content."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The result of one workload on one engine.

    Attributes:
        samples: its responses.
        seconds: the total time.
        background: responses of the background requests.
    """

    samples: list[Sample]
    seconds: float
    background: list[Sample]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric.

    Attributes:
        name: its name in the table, with its unit.
        compute: computes the metric of a run.
        higher: whether higher is better.
    """

    name: str
    compute: Callable[[Run], float]
    higher: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Users who send the same kind of requests.

    Attributes:
        title: one line for the table.
        users: number of concurrent users.
        talks: number of conversations of each user, one after the other.
        make: makes the conversations.
        metrics: the reported metrics.
        background: conversations of one more user, who starts when all others receive tokens, and their number.
    """

    title: str
    users: int
    talks: int
    make: Make
    metrics: tuple[Metric, ...]
    background: tuple[Make, int] | None = None

    def content(self, seed: str) -> tuple[list[Talk], list[Talk]]:
        """Return conversations and background conversations: equal for all engines, new for each seed."""
        source = random.Random(seed)
        talks = self.make(source, self.users * self.talks)
        return talks, self.background[0](source, self.background[1]) if self.background else []


async def run(target: Target, workload: Workload, seed: str) -> Run:
    talks, others = workload.content(seed)
    reading = asyncio.Semaphore(0)
    begin = time.perf_counter()
    main = asyncio.create_task(load(target, talks, users=workload.users, first=reading.release))
    background = list[Sample]()
    if others:
        await asyncio.wait({main, asyncio.create_task(_times(reading, workload.users))}, return_when=FIRST_COMPLETED)
        background = await load(target, others, users=1)
    samples = await main
    return Run(samples=samples, seconds=time.perf_counter() - begin, background=background)


async def _times(reading: asyncio.Semaphore, count: int) -> None:
    for _ in range(count):
        await reading.acquire()


def _per_second(count: Callable[[Sample], int]) -> Callable[[Run], float]:
    return lambda run: sum(map(count, run.samples)) / run.seconds


def _median_of(value: Callable[[Sample], float]) -> Callable[[Run], float]:
    return lambda run: statistics.median(value(sample) for sample in run.samples)


def _gap(quantile: float) -> Callable[[Run], float]:
    return lambda run: 1000 * float(np.quantile([gap for sample in run.samples for gap in sample.gaps], quantile))


REQUESTS = Metric("req/s", _per_second(lambda _: 1), higher=True)
TURNS = Metric("turns/s", _per_second(lambda _: 1), higher=True)
TOKENS = Metric("tok/s", _per_second(lambda sample: sample.tokens), higher=True)
TTFT = Metric("TTFT, s", _median_of(lambda sample: sample.ttft))
TPOT = Metric("TPOT, ms", _median_of(lambda sample: 1000 * sample.tpot))
GAP_99 = Metric("gap p99, ms", _gap(0.99))
GAP_50 = Metric("gap median, ms", _gap(0.5))
LONG_TTFT = Metric("background TTFT, s", lambda run: statistics.median(sample.ttft for sample in run.background))


def jpeg(source: random.Random, side: int = 448) -> bytes:
    """Return a new image of random squares."""
    squares = np.frombuffer(source.randbytes((side // 28) ** 2 * 3), np.uint8).reshape(side // 28, side // 28, 3)
    data = io.BytesIO()
    Image.fromarray(np.kron(squares, np.ones((28, 28, 1), np.uint8))).save(data, "JPEG", quality=90)
    return data.getvalue()


def image_part(source: random.Random, side: int = 448) -> dict[str, Any]:
    """Return a message part with a new image in a data: URL."""
    url = "data:image/jpeg;base64," + base64.b64encode(jpeg(source, side)).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def words(source: random.Random, count: int) -> str:
    """Return made-up words: one token each with the tokenizer of `models.py`, one or two with others."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    return " ".join("".join(source.choices(letters, k=2)) for _ in range(count))


def question_part(source: random.Random) -> dict[str, Any]:
    return {"type": "text", "text": f"What is there to see, {words(source, 3)}?"}


def fresh(tokens: int, *, images: int = 1, side: int = 448) -> Make:
    """Make prompts about new images."""
    return lambda source, count: [
        Talk(turns=([*(image_part(source, side) for _ in range(images)), question_part(source)],), tokens=tokens)
        for _ in range(count)
    ]


def repeated(tokens: int, of: int = 2) -> Make:
    """Make new prompts about `of` images."""

    def make(source: random.Random, count: int) -> list[Talk]:
        known = [image_part(source) for _ in range(of)]
        return [Talk(turns=([source.choice(known), question_part(source)],), tokens=tokens) for _ in range(count)]

    return make


def chat(tokens: int, turns: int) -> Make:
    """Make conversations about a new image each."""

    def make(source: random.Random, count: int) -> list[Talk]:
        return [Talk(turns=tuple(_questions(source, turns)), tokens=tokens) for _ in range(count)]

    return make


def text(tokens: int, prompt: int) -> Make:
    """Make new texts of `prompt` words."""
    return lambda source, count: [Talk(turns=(words(source, prompt),), tokens=tokens) for _ in range(count)]


def workloads(*, quick: bool = False) -> dict[str, Workload]:
    """Return all workloads by name; the quick ones are small, to check that everything works."""
    tokens, talks = (8, 1) if quick else (32, 2)
    long = 16 if quick else 256
    speed = (REQUESTS, TTFT, TPOT)
    return {
        "fresh-1": Workload(
            title="new images, 1 user", users=1, talks=3 * talks, make=fresh(tokens), metrics=(TTFT, TPOT, REQUESTS)
        ),
        "fresh-4": Workload(title="new images, 4 users", users=4, talks=talks, make=fresh(tokens), metrics=speed),
        "fresh-16": Workload(
            title="new images, 16 users", users=16, talks=talks, make=fresh(tokens), metrics=(*speed, GAP_99)
        ),
        "repeated-8": Workload(
            title="two repeated images, 8 users",
            users=8,
            talks=2 * talks,
            make=repeated(tokens),
            metrics=speed,
        ),
        "chats-3": Workload(
            title="chats of three turns, 3 users",
            users=3,
            talks=talks,
            make=chat(tokens, 3),
            metrics=(TURNS, TTFT, TPOT),
        ),
        "text-8": Workload(
            title=f"text, {long} tokens each, 8 users", users=8, talks=1, make=text(long, 32), metrics=(TOKENS, TPOT)
        ),
        "small-4": Workload(
            title="eight new images of 112x112 per request, 4 users",
            users=4,
            talks=talks,
            make=fresh(tokens, images=8, side=112),
            metrics=speed,
        ),
        "mixed-3": Workload(
            title="3 responses during prefill of 1500-word prompts",
            users=3,
            talks=1,
            make=text(5 * tokens, 16),
            metrics=(GAP_99, GAP_50, LONG_TTFT),
            background=(text(4, 1500), 2),
        ),
        "decode-1": Workload(
            title="short text, 1 user", users=1, talks=talks, make=text(2 * tokens, 8), metrics=(TPOT,)
        ),
        "decode-8": Workload(title="short text, 8 users", users=8, talks=1, make=text(2 * tokens, 8), metrics=(TPOT,)),
    }


def _questions(source: random.Random, turns: int) -> Iterator[Content]:
    yield [image_part(source), question_part(source)]
    for _ in range(turns - 1):
        yield words(source, 6)
