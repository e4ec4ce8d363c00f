"""ModelCard: what users are shown of a model. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .json_fields import GENERATION, read_fields

SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCard:
    """What users are shown of a model.

    Attributes:
        description: what it can see and do; empty if that is not known.
        example_prompts: prompts to try it with.
        generation_config: the sampling parameters that its authors recommend. The chat page starts with them; requests
            without them have OpenAI's defaults.
    """

    description: str = ""
    example_prompts: tuple[str, ...] = ()
    generation_config: Mapping[str, float] = field(default_factory=dict, hash=False)


def read_generation_config(folder: Path) -> dict[str, float]:
    """Read the sampling parameters of a checkpoint's `generation_config.json`: temperature 0 if `do_sample` is false.

    Raises:
        CheckpointError: the file is not a JSON object.
    """
    if not (folder / GENERATION).exists():
        return {}
    fields = read_fields(folder / GENERATION)
    if fields.get("do_sample") is False:
        return {"temperature": 0}
    return {name: fields.get(name) for name in SAMPLING if type(fields.get(name)) in (int, float)}
