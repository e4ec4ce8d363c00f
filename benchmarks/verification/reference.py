"""transformers' Qwen2-VL on the same device: the reference for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2VLForConditionalGeneration

from dashinfer_vlm_core.models.interface import Patches

from .tiny import IMAGE, PREPROCESSOR, TinyPrompt


class Reference:
    """One checkpoint in transformers. Prompts run one at a time, so that no padding is involved.

    Args:
        folder: of the checkpoint.
        device: as torch names it.
        dtype: to compute in.
    """

    def __init__(self, folder: Path, *, device: str, dtype: torch.dtype) -> None:
        self._model = Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype=dtype).to(device).eval()
        self._model.generation_config.eos_token_id = None  # completions have a fixed number of tokens
        self._device = device
        self._dtype = dtype

    @torch.inference_mode()
    def vision_tokens(self, images: Sequence[Patches]) -> Tensor:
        """[tokens of all images, hidden size]."""
        pixels, grids = self._pixels(images)
        rows: Tensor = self._model.model.visual(pixels, grids).pooler_output
        return rows

    @torch.inference_mode()
    def greedy(self, prompt: TinyPrompt, count: int) -> list[int]:
        """The first `count` tokens of `generate` without sampling."""
        inputs = self._inputs(prompt, prompt.token_ids.tolist())
        out = self._model.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=0)
        completion: list[int] = out[0, len(prompt.token_ids) :].tolist()
        return completion

    @torch.inference_mode()
    def logprobs(self, prompt: TinyPrompt, completion: Sequence[int]) -> Tensor:
        """Return the log probabilities before each token of `completion`, in one pass without a cache: float32
        [len(completion), vocabulary] on the CPU."""
        inputs = self._inputs(prompt, [*prompt.token_ids.tolist(), *completion[:-1]])
        logits = self._model(**inputs, use_cache=False).logits[0, len(prompt.token_ids) - 1 :]
        return torch.log_softmax(logits.float(), dim=-1).cpu()

    def _inputs(self, prompt: TinyPrompt, ids: Sequence[int]) -> dict[str, Any]:
        tokens = torch.tensor([ids], device=self._device)
        inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if prompt.images:
            inputs["pixel_values"], inputs["image_grid_thw"] = self._pixels(prompt.images)
            inputs["mm_token_type_ids"] = (tokens == IMAGE).int()
        return inputs

    def _pixels(self, images: Sequence[Patches]) -> tuple[Tensor, Tensor]:
        """Normalized patches [n, columns], and int64 [images, 3]."""
        columns = PREPROCESSOR["temporal_patch_size"] * PREPROCESSOR["patch_size"] ** 2
        mean, std = (
            torch.tensor(PREPROCESSOR[name]).repeat_interleave(columns) for name in ("image_mean", "image_std")
        )
        pixels = torch.cat([(torch.from_numpy(image.pixels) / 255 - mean) / std for image in images])
        grids = torch.tensor([image.grid for image in images])
        return pixels.to(self._device, self._dtype), grids.to(self._device)
