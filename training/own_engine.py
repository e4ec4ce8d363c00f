"""Run the checkpoint in this project's engine, with requests as clients send them: OpenAI JSON, images as data URLs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dashinfer_vlm_core import Engine, EngineConfig
from tests.conversations import as_openai
from training.scenes import Sample

GREEDY = MappingProxyType({"temperature": 0, "max_tokens": 64})


class OwnEngine:
    """Generates responses to all samples concurrently; `answer` is the callable that `evaluate` expects.

    Args:
        checkpoint: a folder.
        sampling: fields of the requests; without a temperature, the engine's default applies.
        options: those of `EngineConfig`.
    """

    def __init__(self, checkpoint: Path, sampling: Mapping[str, Any] = GREEDY, **options: Any) -> None:
        self._sampling = sampling
        self._config = EngineConfig(model=str(checkpoint), max_waiting=100_000, **options)

    def answer(self, samples: Sequence[Sample]) -> list[str]:
        return asyncio.run(self._answer(samples))

    async def _answer(self, samples: Sequence[Sample]) -> list[str]:
        async with Engine(self._config) as engine:
            answers = await asyncio.gather(*(engine.achat(self._request(sample)) for sample in samples))
        return [answer.choices[0].message.content or "" for answer in answers]

    def _request(self, sample: Sample) -> dict[str, Any]:
        messages = as_openai([{"role": "user", "content": sample.content()}])
        return {"messages": messages, "tools": list(sample.tools), "seed": sample.seed, **self._sampling}
