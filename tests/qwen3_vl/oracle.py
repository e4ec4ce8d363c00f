"""transformers' Qwen3-VL as the reference: inputs are built without its video processor, which requires torchvision."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize
from transformers.video_utils import VideoMetadata

VIDEO_TEXT = "<|vision_start|><|video_pad|><|vision_end|>"


@dataclass
class Clip:
    """Frames of a video, and what transformers knows about their times."""

    frames: Sequence[Image.Image]
    fps: float = 2.0
    indices: list[int] = field(default_factory=list)

    @property
    def metadata(self) -> VideoMetadata:
        indices = self.indices or list(range(len(self.frames)))
        return VideoMetadata(total_num_frames=indices[-1] + 1, fps=self.fps, frames_indices=list(indices))


class _VideoTexts(Qwen3VLProcessor):
    """The part of transformers' processor that works without torchvision, which its `__init__` requires."""

    def __init__(self, videos: Qwen3VLVideoProcessor) -> None:
        self.video_processor = videos
        self.vision_start_token, self.video_token, self.vision_end_token = (
            "<|vision_start|>",
            "<|video_pad|>",
            "<|vision_end|>",
        )


class Oracle:
    """Generates greedy completions of a checkpoint."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()
        self.images = Qwen2VLImageProcessorPil.from_pretrained(folder)
        settings = json.loads((folder / "video_preprocessor_config.json").read_text())
        self.videos = Qwen3VLVideoProcessor(cap_pixels_per_frame=True, **settings)
        self.processor = _VideoTexts(self.videos)

    @torch.no_grad()
    def generate(self, messages: list[dict[str, Any]], count: int) -> tuple[list[int], torch.Tensor]:
        """Return the greedy response up to and including the end token, and the logits of each of its tokens."""
        inputs = self.inputs(messages)
        self.model.model.rope_deltas = None
        out = self.model.generate(
            **inputs, do_sample=False, max_new_tokens=count, return_dict_in_generate=True, output_logits=True
        )
        return out.sequences[0, inputs["input_ids"].shape[1] :].tolist(), torch.cat(out.logits).float()

    def inputs(self, messages: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Return the inputs of the model's forward pass."""
        text = str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        images, videos = [], []
        for part in (part for message in messages for part in _parts(message)):
            if part["type"] == "image":
                images.append(self.image(part["image"]))
                text = text.replace("<|image_pad|>", "<|placeholder|>" * (images[-1][1].prod() // 4), 1)
            elif part["type"] == "video":
                clip = part["video"] if isinstance(part["video"], Clip) else Clip(part["video"])
                videos.append(self.video(clip))
                replacement = self.video_text(videos[-1][1], clip.metadata)
                # The published processor replaces the tokens around the placeholder, too; transformers 5 keeps them.
                text = text.replace(VIDEO_TEXT, replacement.replace("<|video_pad|>", "<|clip|>"), 1)
        text = text.replace("<|placeholder|>", "<|image_pad|>").replace("<|clip|>", "<|video_pad|>")
        ids = torch.tensor([self.tokenizer(text, add_special_tokens=False)["input_ids"]])
        config = self.model.config
        kinds = (ids == config.image_token_id).long() + 2 * (ids == config.video_token_id).long()
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds}
        for items, values, grid in (
            (images, "pixel_values", "image_grid_thw"),
            (videos, "pixel_values_videos", "video_grid_thw"),
        ):
            if items:
                inputs[values] = torch.cat([pixels for pixels, _ in items]).to(self.model.dtype)
                inputs[grid] = torch.stack([shape for _, shape in items])
        return inputs

    def image(self, image: Image.Image) -> tuple[torch.Tensor, torch.Tensor]:
        """Return normalized patches and grid."""
        found = self.images(images=[image], return_tensors="pt")
        return found["pixel_values"], found["image_grid_thw"][0]

    def video(self, clip: Clip) -> tuple[torch.Tensor, torch.Tensor]:
        """Return normalized patches and grid; frames are resized with Pillow, since tensors need torchvision."""
        height, width = self.video_size(len(clip.frames), clip.frames[0].height, clip.frames[0].width)
        resized = [frame.convert("RGB").resize((width, height), Image.Resampling.BICUBIC) for frame in clip.frames]
        pixels = torch.from_numpy(np.stack([np.asarray(frame) for frame in resized])).permute(0, 3, 1, 2)
        settings = self.videos
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (settings.image_mean, settings.image_std))
        normalized = (pixels / 255 - mean) / std
        patches, *grid = settings.patchify(
            normalized[None], settings.patch_size, settings.merge_size, settings.temporal_patch_size
        )
        return patches[0], torch.tensor(grid)

    def video_size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) after resizing, as `Qwen3VLVideoProcessor.resize` computes it before it resizes."""
        settings = self.videos
        factor, size = settings.patch_size * settings.merge_size, settings.size
        cap = min(settings.max_video_tokens * factor**2, size.longest_edge // frames)
        return smart_resize(
            frames,
            height,
            width,
            temporal_factor=settings.temporal_patch_size,
            factor=factor,
            min_pixels=size.shortest_edge,
            max_pixels=max(cap, int(size.shortest_edge * 1.05)) * frames,
        )

    def video_text(self, grid: torch.Tensor, metadata: VideoMetadata) -> str:
        """Return the text that replaces a video's placeholder."""
        return self.processor.replace_video_token({"video_grid_thw": [grid], "video_metadata": [metadata]}, 0)


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [] if isinstance(message["content"], str) else message["content"]
