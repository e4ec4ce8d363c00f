"""Prompts for which two engines must generate the same tokens, and the script that creates them.

A prompt is frozen if the best logit leads by more than 1 at every step, in fp32 and in bf16, so that a different
order of rounding cannot change the response. Images are not stored; they are drawn again from their seeds.

`python -m training.frozen [--checkpoint DIR]` writes `frozen_prompts.json`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dashinfer_vlm_demo import CHECKPOINT
from training import questions, scenes
from training.scenes import Sample, sample

if TYPE_CHECKING:
    from tests.transformers_engine import TransformersEngine

FILE = Path(__file__).with_name("frozen_prompts.json")
LEAD = 1.0
PER_KIND = 12
KINDS: dict[str, tuple[str, ...]] = {
    "text": scenes.TEXT_TASKS,
    "picture": ("describe_one", "describe_two", "list", "corner", "where", "colour", "empty", "outside"),
    "pictures": ("nth", "which", "changed", "each"),
    "video": ("motion", "clip", "recolour", "motion_still", "motion_two_frames"),
    "turns": ("where", "count", "which", "motion"),
}
"""The tasks of each kind of prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenPrompt:
    """A conversation and its expected continuation. Prompts of the kind `turns` have two user messages."""

    kind: str
    samples: tuple[Sample, ...]
    prompt_tokens: int
    token_ids: tuple[int, ...]
    """Up to and including the end token."""
    text: str
    leads: tuple[float, float]
    """The smallest lead of the best logit, in fp32 and in bf16."""

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages; contents are text or parts: {"text": ...}, {"image": image}, {"video": frames}."""
        return conversation(self.samples)


def conversation(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Build a conversation of all samples' questions and answers up to the last question, on the first one's images."""
    first, *later = samples
    messages: list[dict[str, Any]] = [{"role": "user", "content": first.content()}]
    for before, one in zip(samples, later, strict=False):
        messages.append({"role": "assistant", "content": before.answer})
        messages.append({"role": "user", "content": one.question})
    return messages


def prompts(path: Path = FILE) -> list[FrozenPrompt]:
    """Load the frozen prompts and recreate their scenes."""
    return [_read(entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def candidates(kind: str, seed: int) -> tuple[Sample, ...]:
    """Create one conversation of a kind."""
    tasks = KINDS[kind]
    layout = scenes.LAYOUTS[seed % 3]
    first = sample(tasks[seed % len(tasks)], seed, layout if kind == "pictures" else "after")
    return (first, _second_turn(first)) if kind == "turns" else (first,)


def _second_turn(first: Sample) -> Sample:
    """Create another question about the same images."""
    rng = random.Random(f"second turn {first.task} {first.seed}")
    while True:
        if first.is_video:
            question = questions.color(rng, first.scenes[0])
        elif len(first.scenes) > 1:
            question = questions.nth(rng, first.scenes)
        else:
            question = rng.choice((questions.color, questions.shape, questions.exists))(rng, first.scenes[0])
        if question and question.text != first.question:
            return Sample(
                task=question.task, seed=first.seed, scenes=first.scenes, is_video=first.is_video,
                question=question.text, answer=question.answer,
            )  # fmt: skip


def freeze(checkpoint: Path) -> list[dict[str, Any]]:
    """Find prompts with correct responses and large leads."""
    import torch

    from tests.transformers_engine import TransformersEngine

    engines = [TransformersEngine(checkpoint, dtype) for dtype in (torch.float32, torch.bfloat16)]
    entries: list[dict[str, Any]] = []
    for kind in KINDS:
        found: list[dict[str, Any]] = []
        seed = 0
        while len(found) < PER_KIND:
            entry = _try(kind, seed, engines)
            found += [entry] if entry else []
            seed += 1
        entries += found
        print(f"{kind}: {len(found)} of {seed} tried")
    return entries


def _try(kind: str, seed: int, engines: Sequence[TransformersEngine]) -> dict[str, Any] | None:
    samples = candidates(kind, seed)
    messages = conversation(samples)
    # One at a time: padding must not affect which prompts are frozen.
    responses = [engine.generate([messages]) for engine in engines]
    leads = [min(lead[0]) for _, lead in responses]
    tokens = [response[0][0] for response in responses]
    text = engines[0].tokenizer.decode(tokens[0], skip_special_tokens=True)
    if min(leads) <= LEAD or tokens[0] != tokens[1] or text != samples[-1].answer:
        return None
    return {
        "kind": kind,
        "seed": seed,
        "question": samples[-1].question,
        "text": text,
        "prompt_tokens": engines[0].inputs([messages])["input_ids"].shape[1],
        "token_ids": tokens[0],
        "lead_fp32": round(leads[0], 3),
        "lead_bf16": round(leads[1], 3),
    }


def _read(entry: dict[str, Any]) -> FrozenPrompt:
    return FrozenPrompt(
        kind=entry["kind"],
        samples=candidates(entry["kind"], entry["seed"]),
        prompt_tokens=entry["prompt_tokens"],
        token_ids=tuple(entry["token_ids"]),
        text=entry["text"],
        leads=(entry["lead_fp32"], entry["lead_bf16"]),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training.frozen", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    options = parser.parse_args(arguments)
    entries = freeze(options.checkpoint)
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"{len(entries)} prompts in {FILE.name}")


if __name__ == "__main__":
    main()
