"""A Qwen2-VL model of random weights with the head sizes of the published ones, and prompts for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image as PILImage
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.media import Image
from dashinfer_vlm_core.models.interface import Patches
from dashinfer_vlm_core.models.patches import with_digest
from dashinfer_vlm_core.models.qwen2_vl.config import read_spec
from dashinfer_vlm_core.models.qwen2_vl.image_processor import Qwen2VLImageProcessor
from dashinfer_vlm_core.preprocessing.prompt import PlaceholderSpan

VOCABULARY = 512
ORDINARY = 500
"""Token ids below this are text; the control tokens follow."""
IMAGE, VIDEO, VISION_START, VISION_END, STOP = 500, 501, 502, 503, 511
HIDDEN = 256
PREPROCESSOR: dict[str, Any] = {
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 56 * 56,
    "max_pixels": 448 * 448,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


@dataclass(frozen=True, kw_only=True, eq=False)
class TinyPrompt:
    """One prompt of text and images.

    Attributes:
        name: what is in it, for the report.
        token_ids: int64 [length]; each image is a run of placeholders.
        images: in prompt order.
        spans: the placeholders of each image.
    """

    name: str
    token_ids: npt.NDArray[np.int64]
    images: tuple[Patches, ...]
    spans: tuple[PlaceholderSpan, ...]


def write_tiny_model(folder: Path) -> None:
    """Write a checkpoint of two layers, stored in bfloat16: read as float32, it gives the exact results of its weights.

    The heads have the widths of the published models, 64 in the text model and 80 in the vision tower, because CUDA
    chooses attention kernels by width. The weights are large enough that the best two tokens differ clearly, and the
    rotary base is small enough that short prompts depend on positions.
    """
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 100.0},
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": STOP,
        },
        vision_config={"depth": 2, "embed_dim": 160, "num_heads": 2, "mlp_ratio": 2, "hidden_size": HIDDEN},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name and "ln_q" not in name:
                weight.normal_(std=0.5 if "bias" in name or "embed_tokens" in name else 1.5 * weight[0].numel() ** -0.5)
    model.generation_config.eos_token_id = STOP
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))


def tiny_prompts(folder: Path) -> list[TinyPrompt]:
    """A batch of four: a short text, one of several prefill chunks, one image, and two images of other sizes."""
    processor = Qwen2VLImageProcessor(read_spec(folder).pixels, EngineConfig())
    random = np.random.default_rng(0)

    def image(height: int, width: int) -> Patches:
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        return with_digest(processor.process(Image(image=PILImage.fromarray(pixels), path="image")))

    def prompt(name: str, *parts: int | Patches) -> TinyPrompt:
        return _prompt(name, parts, random)

    return [
        prompt("text", 12),
        prompt("long text", 150),
        prompt("image", 5, image(168, 224), 9),
        prompt("two images", 3, image(84, 140), 4, image(224, 112), 6),
    ]


def _prompt(name: str, parts: Sequence[int | Patches], random: np.random.Generator) -> TinyPrompt:
    """A prompt of parts in order: a number of random text tokens, or an image."""
    ids: list[int] = []
    spans: list[PlaceholderSpan] = []
    for part in parts:
        if isinstance(part, Patches):
            spans.append(PlaceholderSpan(start=len(ids) + 1, length=part.tokens))
            ids += [VISION_START, *[IMAGE] * part.tokens, VISION_END]
        else:
            ids += random.integers(0, ORDINARY, part).tolist()
    images = tuple(part for part in parts if isinstance(part, Patches))
    return TinyPrompt(name=name, token_ids=np.array(ids, np.int64), images=images, spans=tuple(spans))
