"""transformers' models on the same device: the reference for the engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from dashinfer_vlm_core.models.interface import Patches

from .prompts import VIDEO_FPS, TinyPrompt
from .tiny_models import IMAGE, VIDEO


class Reference:
    """One checkpoint in transformers. Prompts run one at a time, so that no padding is involved.

    Args:
        folder: of the checkpoint.
        device: as torch names it.
        dtype: to compute in.
    """

    def __init__(self, folder: Path, *, device: str, dtype: torch.dtype) -> None:
        model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
        self._model = model.to(device).eval()
        self._model.generation_config.eos_token_id = None  # completions have a fixed number of tokens
        self._preprocessor = json.loads((folder / "preprocessor_config.json").read_text())
        self._device = device
        self._dtype = dtype
        self._completions: dict[str, list[int]] = {}
        self._logprobs: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    @torch.inference_mode()
    def vision_tokens(self, items: Sequence[Patches]) -> Tensor:
        """Return [tokens of all images and videos, visual width]."""
        out = self._model.model.visual(*self._pixels(items))
        return torch.cat([out.pooler_output, *(getattr(out, "deepstack_features", None) or ())], dim=1)

    @torch.inference_mode()
    def greedy(self, prompt: TinyPrompt, count: int) -> list[int]:
        """Return the first `count` tokens of `generate` without sampling. They are computed once."""
        if prompt.name not in self._completions:
            inputs = self._inputs(prompt, prompt.token_ids.tolist())
            out = self._model.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=0)
            self._completions[prompt.name] = out[0, len(prompt.token_ids) :].tolist()
        return self._completions[prompt.name]

    @torch.inference_mode()
    def logprobs(self, prompt: TinyPrompt, completion: Sequence[int]) -> Tensor:
        """Return the log probabilities before each token of `completion`, in one pass without a cache: float32
        [len(completion), vocabulary] on the CPU. They are computed once."""
        key = (prompt.name, tuple(completion))
        if key not in self._logprobs:
            inputs = self._inputs(prompt, [*prompt.token_ids.tolist(), *completion[:-1]])
            logits = self._model(**inputs, use_cache=False).logits[0, len(prompt.token_ids) - 1 :]
            self._logprobs[key] = torch.log_softmax(logits.float(), dim=-1).cpu()
        return self._logprobs[key]

    def _inputs(self, prompt: TinyPrompt, ids: Sequence[int]) -> dict[str, Any]:
        self._model.model.rope_deltas = None  # of the prompt before
        tokens = torch.tensor([ids], device=self._device)
        inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        images = [item for item in prompt.items if item.kind == "image"]
        videos = [item for item in prompt.items if item.kind == "video"]
        if prompt.items:
            inputs["mm_token_type_ids"] = (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int()
        if images:
            inputs["pixel_values"], inputs["image_grid_thw"] = self._pixels(images)
        if videos:
            inputs["pixel_values_videos"], inputs["video_grid_thw"] = self._pixels(videos)
            if self._model.config.model_type == "qwen2_5_vl":
                seconds = self._preprocessor["temporal_patch_size"] / VIDEO_FPS
                inputs["second_per_grid_ts"] = torch.full((len(videos),), seconds)
        return inputs

    def _pixels(self, items: Sequence[Patches]) -> tuple[Tensor, Tensor]:
        """Return normalized patches [n, columns], and int64 [items, 3]."""
        columns = self._preprocessor["temporal_patch_size"] * self._preprocessor["patch_size"] ** 2
        mean, std = (
            torch.tensor(self._preprocessor[name]).repeat_interleave(columns) for name in ("image_mean", "image_std")
        )
        pixels = torch.cat([(torch.from_numpy(item.pixels) / 255 - mean) / std for item in items])
        grids = torch.tensor([item.grid for item in items])
        return pixels.to(self._device, self._dtype), grids.to(self._device)
