"""transformers' generate() behind OpenAI's API: transformers_server.py MODEL PORT.

The simplest fair server: all waiting requests form one left-padded batch of up to 16.
"""

from __future__ import annotations

import queue
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, Qwen2VLForConditionalGeneration, StoppingCriteria
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from wire import Chat, serve, start

BATCH = 16
Job = tuple[Chat, "queue.Queue[int | None]"]


class TokenStreamer(StoppingCriteria):
    """A stopping criterion that never stops: called after each step, it forwards the newest tokens."""

    def __init__(self, jobs: list[Job]) -> None:
        self._jobs = jobs
        self._steps = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        self._steps += 1
        for (chat, tokens), token in zip(self._jobs, input_ids[:, -1].tolist(), strict=True):
            if self._steps <= chat.max_tokens:
                tokens.put(token)
            if self._steps == chat.max_tokens:
                tokens.put(None)
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Batches:
    """A thread that generates batch after batch."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._processor = Qwen2VLImageProcessorPil.from_pretrained(model)
        self._model = Qwen2VLForConditionalGeneration.from_pretrained(model, dtype="auto").eval()
        self._waiting: queue.Queue[Job] = queue.Queue()
        start(self._work)

    def generate(self, chat: Chat) -> Iterator[str]:
        tokens: queue.Queue[int | None] = queue.Queue()
        self._waiting.put((chat, tokens))
        while (token := tokens.get()) is not None:
            yield self._tokenizer.decode([token])

    def _work(self) -> None:
        while True:
            jobs = [self._waiting.get()]
            while len(jobs) < BATCH and not self._waiting.empty():
                jobs.append(self._waiting.get())
            self._generate(jobs)

    @torch.inference_mode()
    def _generate(self, jobs: list[Job]) -> None:
        longest = max(chat.max_tokens for chat, _ in jobs)
        config = GenerationConfig(
            do_sample=False, max_new_tokens=longest, eos_token_id=None, pad_token_id=self._tokenizer.pad_token_id
        )
        self._model.model.rope_deltas = None
        self._model.generation_config = config
        try:
            self._model.generate(
                **self._inputs([chat for chat, _ in jobs]),
                generation_config=config,
                stopping_criteria=[TokenStreamer(jobs)],
            )
        finally:
            for _, tokens in jobs:
                tokens.put(None)

    def _inputs(self, chats: list[Chat]) -> dict[str, torch.Tensor]:
        prompts, images = [], []
        for chat in chats:
            found = [self._processor(images=[image], return_tensors="pt") for image in chat.images]
            prompts.append(expanded(chat.prompt, [int(one["image_grid_thw"].prod()) // 4 for one in found]))
            images += found
        padded = self._tokenizer(
            prompts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt"
        )
        ids = padded["input_ids"]
        inputs = {"input_ids": ids, "attention_mask": padded["attention_mask"]}
        inputs["mm_token_type_ids"] = (ids == self._model.config.image_token_id).long()
        if images:
            inputs["pixel_values"] = torch.cat([one["pixel_values"] for one in images]).to(self._model.dtype)
            inputs["image_grid_thw"] = torch.cat([one["image_grid_thw"] for one in images])
        return inputs


def expanded(prompt: str, lengths: list[int]) -> str:
    """Return the prompt with one placeholder for each visual token."""
    pieces = prompt.split("<|image_pad|>")
    pads = [*("<|image_pad|>" * length for length in lengths), ""]
    return "".join(piece + pad for piece, pad in zip(pieces, pads, strict=True))


def main() -> None:
    model, port = Path(sys.argv[1]), int(sys.argv[2])
    serve(Batches(model).generate, model=model, port=port)


if __name__ == "__main__":
    main()
