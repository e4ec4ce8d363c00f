"""Models of random weights for every family that transformers has too: a tiny one to check, larger ones to time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

ORDINARY = 4600  # text tokens, before the control tokens: more than the sampler's fast path looks at
IMAGE, VIDEO, VISION_START, VISION_END, STOP = range(ORDINARY, ORDINARY + 5)
TEXT_NORM = re.compile(r"language_model\..*norm\.weight$")
EXPERTS = 8
CHOSEN_EXPERTS = 4


class Size(NamedTuple):
    """The dimensions of a model of any family."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vision_width: int
    vision_depth: int
    vision_heads: int
    vocabulary: int = 151_936


SIZES = {
    # Heads have the widths of published models, because CUDA selects attention kernels by width.
    "tiny": Size(256, 512, 3, 4, 2, 160, 3, 2, vocabulary=ORDINARY + 8),
    # Qwen2-0.5B with half of Qwen2-VL's vision encoder, Qwen2-VL-2B, and Qwen2-VL-7B.
    "small": Size(896, 4864, 24, 14, 2, 640, 16, 8),
    "2b": Size(1536, 8960, 28, 12, 2, 1280, 32, 16),
    "7b": Size(3584, 18_944, 28, 28, 4, 1280, 32, 16),
}


class Weights(NamedTuple):
    """Numbers of weights: of the text model's layers, its output layer, and the vision encoder; `kv` of a token."""

    text: int
    head: int
    vision: int
    kv: int


def build_model(family: str, size: Size) -> Any:
    """Return a model of transformers without memory for its weights."""
    config_class: Any = CONFIG_MAPPING[family]
    default = config_class()
    config = config_class(
        text_config=_text_config(size, default.text_config),
        vision_config=_vision_config(size, default.vision_config),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]


def count_weights(model: Any) -> Weights:
    text = model.config.text_config
    return Weights(
        text=sum(weight.numel() for weight in model.model.language_model.layers.parameters()),
        head=model.lm_head.weight.numel(),
        vision=sum(weight.numel() for weight in model.model.visual.parameters()),
        kv=2 * text.num_key_value_heads * text.head_dim * _layer_types(text).count("full_attention"),
    )


def write_model(model: Any, folder: Path) -> None:
    """Give a model of `build_model` weights, and write it to a new folder.

    It is stored in bfloat16: read as float32, it gives the exact results of its weights.
    """
    model.to_empty(device="cpu").tie_weights()
    _fill(model)
    model.generation_config.eos_token_id = STOP
    model.save_pretrained(folder)
    vision = model.config.vision_config
    pixels = (vision.patch_size * vision.spatial_merge_size) ** 2
    preprocessing = {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
        "image_mean": [0.48, 0.46, 0.41],
        "image_std": [0.27, 0.26, 0.28],
        "size": {"shortest_edge": 4 * pixels, "longest_edge": 256 * pixels},
    }
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (folder / name).write_text(json.dumps(preprocessing))


@torch.no_grad()
def _fill(model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    is_hybrid = hasattr(model.config.text_config, "linear_num_key_heads")
    for name, weight in model.named_parameters():
        mean, std = _distribution(name, weight)
        has_offset = is_hybrid and "linear_attn" not in name and TEXT_NORM.search(name) is not None
        weight.normal_(mean - has_offset, std, generator=generator)
    # A completion with a control token could not be given to transformers.
    model.lm_head.weight[ORDINARY : STOP + 1] = 0


def _distribution(name: str, weight: Tensor) -> tuple[float, float]:
    # Large enough that the best two tokens differ clearly, and that completions do not only repeat the last token.
    if name.endswith("A_log"):  # otherwise, states would be forgotten after few tokens
        return -3.0, 1.0
    if weight.ndim == 1:
        return (0.0, 0.5) if name.endswith("bias") else (1.0, 0.1)  # otherwise, it is of a norm
    if "embed_tokens" in name or "pos_embed" in name:
        return 0.0, 0.3
    inputs = weight.shape[-1] if weight.ndim == 3 else weight[0].numel()
    # The last chosen expert depends on rounding: the scores of experts are so large that its share is small.
    gain = 8.0 if weight.ndim == 2 and len(weight) == EXPERTS else 1.5
    return 0.0, gain * inputs**-0.5


def _text_config(size: Size, default: Any) -> dict[str, Any]:
    head_dim = size.hidden // size.heads
    rotary = default.to_dict().get("rope_parameters") or {}
    columns = int(head_dim * rotary.get("partial_rotary_factor", 1))
    side = 5 * columns // 32  # published models of 128: 24, 20, 20
    sections = [columns // 2 - 2 * side, side, side]
    options: dict[str, Any] = {
        "num_experts": EXPERTS,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN_EXPERTS,
        "moe_intermediate_size": size.inner // CHOSEN_EXPERTS,
        "shared_expert_intermediate_size": size.inner // CHOSEN_EXPERTS,
        "linear_num_key_heads": size.kv_heads,
        "linear_num_value_heads": size.heads,
        "linear_key_head_dim": size.hidden // 16,
        "linear_value_head_dim": size.hidden // 16,
    }
    if hasattr(default, "linear_num_key_heads"):
        interval = min(4, size.layers - 1)
        options["layer_types"] = [
            "linear_attention" if number % interval else "full_attention" for number in range(size.layers)
        ]
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
        # The base is so small that short prompts depend on positions.
        "rope_parameters": {**rotary, "rope_type": "default", "rope_theta": 100.0, "mrope_section": sections},
        "tie_word_embeddings": True,
        "eos_token_id": STOP,
        **{name: value for name, value in options.items() if hasattr(default, name)},
    }


def _layer_types(text: Any) -> list[str]:
    return list(text.to_dict().get("layer_types") or ["full_attention"] * text.num_hidden_layers)


def _vision_config(size: Size, default: Any) -> dict[str, Any]:
    # Families name the width and the size of a visual token differently: the latter is `hidden_size` in Qwen2-VL.
    names = ("embed_dim", "hidden_size") if hasattr(default, "embed_dim") else ("hidden_size", "out_hidden_size")
    chosen_blocks = {
        name: [block for block in blocks if block < size.vision_depth] or list(range(size.vision_depth - 1))
        for name, blocks in default.to_dict().items()
        if name.endswith("_indexes")
    }
    inner = {"intermediate_size": 8 * size.vision_width // 3} if hasattr(default, "intermediate_size") else {}
    dimensions = {"depth": size.vision_depth, "num_heads": size.vision_heads}
    return {**dimensions, **dict(zip(names, (size.vision_width, size.hidden), strict=True)), **chosen_blocks, **inner}
