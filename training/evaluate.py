"""Measure exact match per task on unseen scenes: `python -m training.evaluate CHECKPOINT [--n 300]`.

Any engine can be measured: `evaluate(answer)` accepts any callable that maps samples to responses.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from training import scenes, vocabulary
from training.scenes import Sample, sample

if TYPE_CHECKING:
    from tests.transformers_engine import TransformersEngine

Answer = Callable[[Sequence[Sample]], list[str]]

FLOORS = dict.fromkeys(scenes.IMAGE_TASKS, 0.95) | {"list": 0.80, "nth": 0.95, "which": 0.95}
FLOORS |= dict.fromkeys(("motion", "motion_still", "motion_two_frames"), 0.95)
FLOORS |= dict.fromkeys((*scenes.OUT_OF_SCOPE_TASKS, "tools offered"), 0.95)
FLOORS |= dict.fromkeys(scenes.CENTERED_TASKS, 0.95) | dict.fromkeys(scenes.UNKNOWN_TASKS, 0.90)
"""The required exact match per task."""


class Mixture(NamedTuple):
    """A row that cycles over several tasks, with another order of text and images or with tools in the prompt."""

    tasks: tuple[str, ...]
    layout: str = "after"
    with_tools: bool = False


_WITH_TOOLS = (
    "describe_one", "colour", "count", "where", "exists", "chat", "outside_text", "objects", "knowledge", "requests",
)  # fmt: skip
MIXTURES = {
    "pictures, question first": Mixture(scenes.IMAGE_TASKS, "before"),
    "sets, question first": Mixture(scenes.SET_TASKS, "before"),
    "sets, labeled": Mixture(scenes.SET_TASKS, "labeled"),
    "clips, question first": Mixture(scenes.VIDEO_TASKS, "before"),
    "tools offered": Mixture(_WITH_TOOLS, with_tools=True),
    "centered, any radius": Mixture(scenes.CENTERED_TASKS),
    "unknown, any kind": Mixture(scenes.UNKNOWN_TASKS),
}
NAMES = (*scenes.TASKS, *scenes.USER_TASKS, *MIXTURES)
NAMELESS = (vocabulary.NOT_KNOWN, vocabulary.NO_SHAPES, vocabulary.OUTSIDE)
"""Responses that count as correct if the image shows nothing that the model knows: they name no shape."""
FIRST_SEED = 1_000_000

OWN_ENGINES: dict[str, dict[str, Any]] = {
    "own": {"dtype": "float32"},
    "own-defaults": {"dtype": "float32", "sampling": {}},
    "own-bfloat16": {"dtype": "bfloat16"},
    "own-int8": {"dtype": "bfloat16", "quantization": "int8"},
    "own-int8-text": {"dtype": "bfloat16", "quantization": "int8", "vision_quantization": "none"},
    "own-int8-kv-cache": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "own-int4": {"dtype": "bfloat16", "quantization": "int4"},
}
"""Options of `OwnEngine` by the name of the variant. `own-defaults` requests neither a temperature nor a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The share of exactly matching responses, and the wrong ones as (question, expected answer, response); see
    `NAMELESS`."""

    name: str
    exact: float
    count: int
    wrong: tuple[tuple[str, str, str], ...]


def evaluate(answer: Answer, count: int = 300, names: Sequence[str] | None = None) -> Iterator[Result]:
    """Yield the result of each task and then of each mixture; `names` selects some of them."""
    for name in names or NAMES:
        samples = [_sample(name, index) for index in range(count)]
        responses = answer(samples)
        wrong = [
            (one.question, one.answer, response)
            for one, response in zip(samples, responses, strict=True)
            if response.strip() not in (NAMELESS if one.answer == vocabulary.NOT_KNOWN else (one.answer,))
        ]
        yield Result(name=name, exact=1 - len(wrong) / count, count=count, wrong=tuple(wrong))


def table(results: Sequence[Result]) -> str:
    """Format the results as a Markdown table."""
    lines = ["| task | exact match | required |", "|---|---|---|"]
    for result in results:
        floor = f"{FLOORS[result.name]:.0%}" if result.name in FLOORS else ""
        lines.append(f"| {result.name} | {result.exact:.1%} | {floor} |")
    return "\n".join(lines)


def _sample(name: str, index: int) -> Sample:
    if name in MIXTURES:
        tasks, layout, with_tools = MIXTURES[name]
        return sample(tasks[index % len(tasks)], FIRST_SEED + index, layout, with_tools=with_tools)
    return sample(name, FIRST_SEED + index)


def _engine(name: str, checkpoint: Path) -> Answer:
    """Create an engine. Engines are imported here because that takes seconds, too long for `--help`."""
    if name in OWN_ENGINES:
        from training.own_engine import OwnEngine

        return OwnEngine(checkpoint, **OWN_ENGINES[name]).answer
    from tests.transformers_engine import TransformersEngine

    return reference_answer(TransformersEngine(checkpoint))


def reference_answer(engine: TransformersEngine) -> Answer:
    """Return the callable with which transformers responds to samples."""
    return lambda samples: engine.respond([sample.messages() for sample in samples])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--n", type=int, default=300, help="samples per task")
    parser.add_argument(
        "--task", action="append", choices=NAMES, metavar="NAME", help="only this task; may be given more than once"
    )
    parser.add_argument("--wrong", type=int, default=0, help="number of wrong responses to show per task")
    parser.add_argument(
        "--engine", choices=("transformers", *OWN_ENGINES), default="transformers", help="engine to run"
    )
    options = parser.parse_args(arguments)
    if options.n < 1:
        parser.error("--n: at least one sample")
    results = []
    for result in evaluate(_engine(options.engine, options.checkpoint), options.n, options.task):
        results.append(result)
        print(f"{result.name:28} {result.exact:.3f}", flush=True)
        for question, expected, response in result.wrong[: options.wrong]:
            print(f"    {question!r}: expected {expected!r}, got {response!r}")
    print("\n" + table(results))


if __name__ == "__main__":
    main()
