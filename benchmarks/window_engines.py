"""Requests about windows of a recording, and their time with servers, of which one is loaded at a time."""

from __future__ import annotations

import asyncio
import base64
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from dashinfer_vlm_core import EngineConfig

from .client import HTTPTarget, Sample, Talk, load
from .compare import OURS
from .engines import Launch, Server, configured, other_engine
from .environments import OtherEngines
from .rounds import describe
from .workloads import jpeg, question_part

VLLM_OPTIONS = (
    "--limit-mm-per-prompt", '{"image": 0, "video": 1}',
    "--media-io-kwargs", '{"video": {"num_frames": -1, "fps": 2}}',
)  # fmt: skip
"""It reads all frames of a video, and assumes the rate that this engine assumes."""

OUTPUT_TOKENS = 4
HEADER = ("| engine | request | prompt tokens | first token, s | ratio |", "|---|---|---|---|---|")

Parts = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Window:
    """Frames of a recording.

    Attributes:
        name: the name of its row.
        start: the first of the frames.
        extra: number of the frames after those of the new clip.
        new: number of the frames that no earlier request had.
    """

    name: str
    start: int
    extra: int
    new: int


NEW = "new clip"
WINDOWS = (
    Window("2 frames appended", 0, 2, 2),
    Window("moved by 2 frames", 2 + 2, 2 + 2, 2),
    Window("moved by 8 frames", 4 + 8, 4 + 8, 8),
)
"""In this order: each has frames that the ones before it do not have."""

RECORDED = max(window.extra for window in WINDOWS)
"""Frames of a recording after those of the clip."""


class Question(NamedTuple):
    """The name of a request, the `data:` URLs of its frames, and the text after them."""

    name: str
    urls: list[str]
    text: dict[str, Any]


def questions(source: random.Random, frames: int, side: int) -> Iterator[Question]:
    """Yield the requests about a new recording: the new clip of `frames` frames, then all windows."""
    urls = [_frame_url(source, side) for _ in range(frames + RECORDED)]
    for window in (Window(NEW, 0, 0, frames), *WINDOWS):
        yield Question(window.name, urls[window.start : frames + window.extra], question_part(source))


def _frame_url(source: random.Random, side: int) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(jpeg(source, side)).decode()


def frame_list(urls: Sequence[str]) -> Parts:
    """Return a video in this engine's format."""
    return [{"type": "video_url", "video_url": {"url": list(urls), "align": True}}]


def joined_frames(urls: Sequence[str]) -> Parts:
    """Return a video in vLLM's format: the base64 of the frames in one URL."""
    joined = ",".join(url.partition(",")[2] for url in urls)
    return [{"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{joined}"}}]


def images(urls: Sequence[str]) -> Parts:
    """Return the frames as images, for engines without videos."""
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls]


@dataclass(frozen=True, slots=True)
class Load:
    """The number of rounds, the frames of a clip, and the width and height of a frame in pixels."""

    rounds: int
    frames: int
    side: int


def compare(
    names: Sequence[str], config: EngineConfig, other_engines: OtherEngines, logs: Path, requested: Load
) -> Iterator[str]:
    """Yield the rows of engines, which run one after the other, and then notes, also on those that fail.

    Args:
        names: names of `ENGINES`.
        config: the model, and the options of this engine.
        other_engines: where others are installed.
        logs: folder for the output of the servers.
        requested: the size of the requests.
    """
    notes = []
    for name in names:
        encode = _encoding(name)
        try:
            launch = _launch(name, config, other_engines, logs)
            responses = _measure(launch, logs / f"windows-{name}.log", encode, requested)
        except RuntimeError as error:
            notes.append(f"* {name}: {describe(error)}")
            continue
        yield from _rows(name, responses)
        remarks = filter(None, (launch.note, "frames as images" if encode is images else ""))
        notes.extend(f"* {name}: {remark}" for remark in remarks)
    yield from notes


def _encoding(name: str) -> Callable[[Sequence[str]], Parts]:
    if name in OURS:
        return frame_list
    return joined_frames if name.startswith("vllm") else images


def _launch(name: str, config: EngineConfig, other_engines: OtherEngines, folder: Path) -> Launch:
    if name in OURS:
        return configured(name, config, folder, *OURS[name])
    launch = other_engine(name, Path(config.model), other_engines, slots=1)
    return replace(launch, command=(*launch.command, *VLLM_OPTIONS)) if name.startswith("vllm") else launch


def _measure(
    launch: Launch, log: Path, encode: Callable[[Sequence[str]], Parts], requested: Load
) -> list[dict[str, Sample]]:
    """Start a server, send the requests, and stop it; return their responses by name for each round."""
    server = Server(launch, log)
    try:
        return asyncio.run(_ask_rounds(server, encode, requested))
    finally:
        server.stop()


async def _ask_rounds(
    server: Server, encode: Callable[[Sequence[str]], Parts], requested: Load
) -> list[dict[str, Sample]]:
    source = random.Random("windows")
    async with server.target() as target:
        responses = [
            {
                each.name: await _ask(target, each, encode)
                for each in questions(source, requested.frames, requested.side)
            }
            for _ in range(1 + requested.rounds)
        ]
    return responses[1:]  # the first round warms up


async def _ask(target: HTTPTarget, question: Question, encode: Callable[[Sequence[str]], Parts]) -> Sample:
    content = [*encode(question.urls), question.text]
    (sample,) = await load(target, [Talk(turns=(content,), tokens=OUTPUT_TOKENS)], users=1)
    if sample.fault:
        raise RuntimeError(f"{question.name}: {sample.fault}")
    return sample


def _rows(engine: str, rounds: Sequence[dict[str, Sample]]) -> Iterator[str]:
    """Yield a row for each request to an engine: medians of the rounds, and the ratios to its own new clip."""
    for name in rounds[0]:
        seconds = [each[name].ttft for each in rounds]
        ratios = [each[name].ttft / each[NEW].ttft for each in rounds]
        cells = (
            engine,
            name,
            str(rounds[0][name].prompt_tokens or ""),
            f"{statistics.median(seconds):.3f}",
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
        )
        yield f"| {' | '.join(cells)} |"
