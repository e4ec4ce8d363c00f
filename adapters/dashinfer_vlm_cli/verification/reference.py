"""transformers' models on the same device: the reference for the engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from dashinfer_vlm_core.models.interface import Patches

from .checkpoint import Checkpoint, Prompt
from .models import IMAGE, VIDEO


class Reference:
    """One checkpoint in transformers. Prompts run one at a time, so that no padding is involved."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        model: Any = AutoModelForImageTextToText.from_pretrained(checkpoint.folder, dtype=dtype)
        self._model = model.to(checkpoint.device).eval()
        self._preprocessor = json.loads((checkpoint.folder / "preprocessor_config.json").read_text())
        self._device = checkpoint.device
        self._dtype = dtype
        self._logprobs: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    @torch.inference_mode()
    def vision_tokens(self, items: Sequence[Patches]) -> Tensor:
        """Return [tokens, visual width]."""
        out = self._model.model.visual(*self._pixels(items))
        return torch.cat([out.pooler_output, *(getattr(out, "deepstack_features", None) or ())], dim=1)

    @torch.inference_mode()
    def logprobs(self, prompt: Prompt, completion: Sequence[int]) -> Tensor:
        """Return the log probabilities before each token of `completion`, in one pass without a cache: float32
        [len(completion), vocabulary] on the CPU. They are computed once."""
        key = (prompt.name, tuple(completion))
        if key not in self._logprobs:
            inputs = self._inputs(prompt, [*prompt.token_ids.tolist(), *completion[:-1]])
            logits = self._model(**inputs, use_cache=False).logits[0, len(prompt.token_ids) - 1 :]
            self._logprobs[key] = torch.log_softmax(logits.float(), dim=-1).cpu()
        return self._logprobs[key]

    def _inputs(self, prompt: Prompt, ids: Sequence[int]) -> dict[str, Any]:
        self._model.model.rope_deltas = None  # of the prompt before
        tokens = torch.tensor([ids], device=self._device)
        inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if prompt.items:
            inputs["mm_token_type_ids"] = (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int()
        if images := [item for item in prompt.items if item.kind == "image"]:
            inputs["pixel_values"], inputs["image_grid_thw"] = self._pixels(images)
        if videos := [item for item in prompt.items if item.kind == "video"]:
            inputs["pixel_values_videos"], inputs["video_grid_thw"] = self._pixels(videos)
        return inputs

    def _pixels(self, items: Sequence[Patches]) -> tuple[Tensor, Tensor]:
        columns = self._preprocessor["temporal_patch_size"] * self._preprocessor["patch_size"] ** 2
        mean = torch.tensor(self._preprocessor["image_mean"]).repeat_interleave(columns)
        std = torch.tensor(self._preprocessor["image_std"]).repeat_interleave(columns)
        pixels = torch.cat([(torch.from_numpy(item.pixels) / 255 - mean) / std for item in items])
        grids = torch.tensor([item.grid for item in items])
        return pixels.to(self._device, self._dtype), grids.to(self._device)
