"""Models of two or three layers and random weights, one of each family, with the head sizes of published ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

ORDINARY = 4600
"""Token ids below this are text; the control tokens follow. There are more tokens than the sampler's fast path looks
at, so that both of its paths run."""
IMAGE, VIDEO, VISION_START, VISION_END, STOP = range(ORDINARY, ORDINARY + 5)
VOCABULARY = ORDINARY + 8
HIDDEN = 256
PATCH_SIZES = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16}
_MEANS_AND_STDS = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}


def write_tiny_model(family: str, folder: Path) -> None:
    """Write a checkpoint stored in bfloat16: read as float32, it gives the exact results of its weights.

    The heads have the widths of published models, 64 in the text model, and 80 or 64 in the vision encoder, because
    CUDA chooses attention kernels by width. The weights are large enough that the best two tokens differ clearly, and
    the rotary base is small enough that short prompts depend on positions.

    Args:
        family: one of `FAMILIES`.
        folder: an empty one.
    """
    torch.manual_seed(0)
    model: Any = FAMILIES[family]()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name and "ln_q" not in name:
                is_small = "bias" in name or "embed_tokens" in name
                weight.normal_(std=0.5 if is_small else _scale(family, name) * weight[0].numel() ** -0.5)
    model.generation_config.eos_token_id = STOP
    model.to(torch.bfloat16).save_pretrained(folder)
    side = 2 * PATCH_SIZES[family]
    pixels = {"patch_size": PATCH_SIZES[family], "temporal_patch_size": 2, "merge_size": 2, **_MEANS_AND_STDS}
    limits: dict[str, Any] = {"min_pixels": 4 * side**2, "max_pixels": 256 * side**2}
    if family == "qwen3_vl":
        limits = {"size": {"shortest_edge": 4 * side**2, "longest_edge": 256 * side**2}}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(pixels | limits))
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels | limits))


def _scale(family: str, name: str) -> float:
    """Return the standard deviation of a layer's outputs, for inputs of standard deviation 1."""
    gated = family == "qwen2_5_vl" and "visual" in name  # gated MLPs multiply rounding errors
    return 1.0 if gated else 1.5


def _qwen2_vl() -> PreTrainedModel:
    vision = {"depth": 2, "embed_dim": 160, "num_heads": 2, "mlp_ratio": 2, "hidden_size": HIDDEN}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=_text(), vision_config=vision, **_tokens()))


def _qwen2_5_vl() -> PreTrainedModel:
    """The first block has windows, and the second one attends to the whole image."""
    vision = {
        "depth": 2,
        "hidden_size": 160,
        "intermediate_size": 212,
        "out_hidden_size": HIDDEN,
        "num_heads": 2,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    }
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=_text(), vision_config=vision, **_tokens()))


def _qwen3_vl() -> PreTrainedModel:
    """With visual tokens of three levels."""
    vision = {
        "depth": 3,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": 144,
        "deepstack_visual_indexes": [0, 1],
    }
    text = _text(
        num_hidden_layers=3,
        head_dim=64,
        rope_parameters={
            "rope_type": "default",
            "mrope_section": [12, 10, 10],
            "mrope_interleaved": True,
            "rope_theta": 100.0,
        },
    )
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **_tokens()))


def _text(**changed: Any) -> dict[str, Any]:
    return {
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
        **changed,
    }


def _tokens() -> dict[str, Any]:
    return {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
        "tie_word_embeddings": True,
    }


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
}
"""The models, by `model_type`."""
