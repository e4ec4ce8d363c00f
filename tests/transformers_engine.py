"""Run the checkpoint in transformers, as an independent reference. Inputs are built without Qwen2-VL's full processor,
which requires torchvision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

Messages = list[dict[str, Any]]
PATCH, FACTOR = 14, 28
"""Sides in pixels of a patch, and of the area of a token."""


class TransformersEngine:
    """Generates greedy responses to conversations.

    Args:
        checkpoint: a folder.
        dtype: dtype of the computation.
        batch: conversations of a forward pass.
        video_fps: frames per second of the videos, on which the positions of Qwen2.5-VL depend.
    """

    def __init__(
        self, checkpoint: Path, dtype: torch.dtype = torch.float32, batch: int = 50, video_fps: float = 2.0
    ) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(checkpoint)
        self.model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=dtype).eval()  # type: ignore[no-untyped-call]  # transformers leaves eval untyped
        self.batch = batch
        self.video_fps = video_fps

    def respond(self, conversations: Sequence[Messages]) -> list[str]:
        responses: list[str] = []
        for start in range(0, len(conversations), self.batch):
            tokens, _ = self.generate(conversations[start : start + self.batch])
            responses += [str(self.tokenizer.decode(response, skip_special_tokens=True)) for response in tokens]
        return responses

    @torch.no_grad()
    def generate(self, conversations: Sequence[Messages]) -> tuple[list[list[int]], list[list[float]]]:
        """Return greedy responses up to and including the end token, and the lead of each token's logit over the second
        best."""
        inputs = self.inputs(conversations)
        self.model.model.rope_deltas = None
        out = self.model.generate(
            **inputs, do_sample=False, max_new_tokens=64, return_dict_in_generate=True, output_logits=True
        )
        responses = out.sequences[:, inputs["input_ids"].shape[1] :].tolist()
        best = torch.stack(out.logits, dim=1).float().topk(2, dim=-1).values
        leads = (best[..., 0] - best[..., 1]).tolist()
        end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        lengths = [response.index(end) + 1 if end in response else len(response) for response in responses]
        return (
            [response[:length] for response, length in zip(responses, lengths, strict=True)],
            [lead[:length] for lead, length in zip(leads, lengths, strict=True)],
        )

    def inputs(self, conversations: Sequence[Messages]) -> dict[str, Tensor]:
        """Return the left-padded inputs of the model's forward pass."""
        images, videos, prompts = [], [], []
        for messages in conversations:
            parts = [part for message in messages if not isinstance(message["content"], str)
                     for part in message["content"]]  # fmt: skip
            own_images = [self._image(part["image"]) for part in parts if part["type"] == "image"]
            own_videos = [self._video(part["video"]) for part in parts if part["type"] == "video"]
            prompts.append(self._prompt(messages, own_images, own_videos))
            images += own_images
            videos += own_videos
        padded = self.tokenizer(
            prompts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt"
        )
        ids = padded["input_ids"]
        kinds = (ids == self.model.config.image_token_id).long() + 2 * (ids == self.model.config.video_token_id).long()
        inputs = {"input_ids": ids, "attention_mask": padded["attention_mask"], "mm_token_type_ids": kinds}
        for visuals, values, grid in (
            (images, "pixel_values", "image_grid_thw"),
            (videos, "pixel_values_videos", "video_grid_thw"),
        ):
            if visuals:
                inputs[values] = torch.cat([pixels for pixels, _ in visuals]).to(self.model.dtype)
                inputs[grid] = torch.tensor([shape for _, shape in visuals])
        if videos and self.model.config.model_type == "qwen2_5_vl":
            inputs["second_per_grid_ts"] = torch.tensor([2 / self.video_fps] * len(videos))
        return inputs

    def _prompt(self, messages: Messages, *visuals: list[tuple[Tensor, tuple[int, int, int]]]) -> str:
        """Render the chat template, with each placeholder repeated once per vision token."""
        text = str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        for pad, own in zip(("<|image_pad|>", "<|video_pad|>"), visuals, strict=True):
            for _, (time, rows, columns) in own:
                text = text.replace(pad, "<|placeholder|>" * (time * rows * columns // 4), 1)
            text = text.replace("<|placeholder|>", pad)
        return text

    def _image(self, picture: Image.Image) -> tuple[Tensor, tuple[int, int, int]]:
        found = self.processor(images=[picture], return_tensors="pt")
        time, rows, columns = found["image_grid_thw"][0].tolist()
        return found["pixel_values"], (time, rows, columns)

    def _video(self, frames: Sequence[Image.Image]) -> tuple[Tensor, tuple[int, int, int]]:
        limits = self.processor.size
        height, width = smart_resize(
            frames[0].height, frames[0].width, FACTOR, limits["shortest_edge"], limits["longest_edge"]
        )
        scaled = [frame.convert("RGB").resize((width, height), Image.Resampling.BICUBIC) for frame in frames]
        resized = [np.asarray(frame) for frame in scaled]
        resized += resized[-1:] * (len(resized) % 2)
        pairs = torch.from_numpy(np.stack(resized)).view(-1, 2, height, width, 3)
        return self._patches(pairs), (len(pairs), height // PATCH, width // PATCH)

    def _patches(self, pairs: Tensor) -> Tensor:
        """Convert pairs of frames, uint8 [pairs, 2, height, width, 3], to normalized patches in Qwen2-VL's order."""
        mean, deviation = torch.tensor(self.processor.image_mean), torch.tensor(self.processor.image_std)
        normalized = (pairs.float() / 255 - mean) / deviation
        height, width = (size // FACTOR for size in pairs.shape[2:4])
        cut = normalized.view(-1, 2, height, 2, PATCH, width, 2, PATCH, 3)
        return cut.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, 3 * 2 * PATCH * PATCH)
