"""Qwen2-VL models of realistic sizes and random weights. Their output is meaningless; their cost is realistic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dashinfer_vlm_core.models.safetensors_writer import TensorInfo, write_safetensors

from .checkpoint_files import IDS, PIXELS, write_json, write_tokenizer

CONTEXT = 32_768
SCALE = 0.02
"""Standard deviation of the weights."""
NUM_RANDOM = 1_048_573
"""Numbers that the weights repeat. It is a prime, so that the rows of a matrix differ."""


@dataclass(frozen=True, kw_only=True)
class SpeedModel:
    """The dimensions of a model.

    Attributes:
        title: what the report calls it.
        tied: whether the output layer is the embedding table.
    """

    title: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    tower_width: int
    tower_layers: int
    tower_heads: int
    vocabulary: int = 151_936
    tied: bool = True

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def nbytes(self) -> int:
        """Size of the weights in bytes."""
        return sum(info.nbytes for info in _tensors(self))


SPEED_MODELS = {
    "tiny": SpeedModel(
        title="one layer", hidden=64, inner=96, layers=1, heads=2, kv_heads=1,
        tower_width=32, tower_layers=1, tower_heads=2,
    ),
    "small": SpeedModel(
        title="the text model of Qwen2-0.5B with half of Qwen2-VL's vision encoder", hidden=896, inner=4864, layers=24,
        heads=14, kv_heads=2, tower_width=640, tower_layers=16, tower_heads=8,
    ),
    "2b": SpeedModel(
        title="the shape of Qwen2-VL-2B", hidden=1536, inner=8960, layers=28, heads=12, kv_heads=2,
        tower_width=1280, tower_layers=32, tower_heads=16,
    ),
    "7b": SpeedModel(
        title="the shape of Qwen2-VL-7B", hidden=3584, inner=18_944, layers=28, heads=28, kv_heads=4,
        tower_width=1280, tower_layers=32, tower_heads=16, vocabulary=152_064, tied=False,
    ),
}  # fmt: skip


def write_speed_model(model: SpeedModel, folder: Path) -> None:
    """Write configuration, weights (bfloat16) and tokenizer in the layout of the published checkpoints.

    The weights repeat about a million random numbers, because new ones would take most of the time. One tensor at a
    time is in memory.

    Raises:
        OSError: the disk is full.
    """
    infos = _tensors(model)
    write_safetensors(folder / "model.safetensors", infos, _weights(infos))
    stop = [IDS["<|im_end|>"], IDS["<|endoftext|>"]]
    write_json(folder / "config.json", _config(model))
    write_json(folder / "generation_config.json", {"eos_token_id": stop, "pad_token_id": stop[1]})
    write_json(folder / "preprocessor_config.json", PIXELS)
    write_tokenizer(folder)


def _tensors(model: SpeedModel) -> list[TensorInfo]:
    return [TensorInfo(name, torch.bfloat16, shape) for name, shape in (*_text_tensors(model), *_tower_tensors(model))]


def _text_tensors(model: SpeedModel) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, keys = model.hidden, model.inner, model.kv_heads * model.head_dim
    yield "model.embed_tokens.weight", (model.vocabulary, hidden)
    for number in range(model.layers):
        layer = f"model.layers.{number}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        for name, rows in (("q_proj", hidden), ("k_proj", keys), ("v_proj", keys)):
            yield f"{layer}.self_attn.{name}.weight", (rows, hidden)
            yield f"{layer}.self_attn.{name}.bias", (rows,)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not model.tied:
        yield "lm_head.weight", (model.vocabulary, hidden)


def _tower_tensors(model: SpeedModel) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, merged = model.tower_width, 4 * model.tower_width
    yield "visual.patch_embed.proj.weight", (width, 3, PIXELS["temporal_patch_size"], *2 * [PIXELS["patch_size"]])
    for number in range(model.tower_layers):
        block = f"visual.blocks.{number}"
        yield from _with_bias(f"{block}.norm1", width)
        yield from _with_bias(f"{block}.attn.qkv", 3 * width, width)
        yield from _with_bias(f"{block}.attn.proj", width, width)
        yield from _with_bias(f"{block}.norm2", width)
        yield from _with_bias(f"{block}.mlp.fc1", 4 * width, width)
        yield from _with_bias(f"{block}.mlp.fc2", width, 4 * width)
    yield from _with_bias("visual.merger.ln_q", width)
    yield from _with_bias("visual.merger.mlp.0", merged, merged)
    yield from _with_bias("visual.merger.mlp.2", model.hidden, merged)


def _with_bias(module: str, *shape: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{module}.weight", shape
    yield f"{module}.bias", shape[:1]


def _weights(infos: list[TensorInfo]) -> Iterator[Tensor]:
    numbers = (SCALE * torch.randn(NUM_RANDOM, generator=torch.Generator().manual_seed(0))).to(torch.bfloat16)
    start = 0
    for info in infos:
        if len(info.shape) == 1:
            yield torch.full(info.shape, float(info.name.endswith("weight")), dtype=torch.bfloat16)  # a norm, or a bias
            continue
        count = math.prod(info.shape)
        start %= NUM_RANDOM
        yield numbers.repeat(-(-(start + count) // NUM_RANDOM))[start : start + count].view(info.shape)
        start += count


def _config(model: SpeedModel) -> dict[str, Any]:
    time = model.head_dim // 8
    return {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "intermediate_size": model.inner,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "vocab_size": model.vocabulary,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [time, *2 * [(model.head_dim // 2 - time) // 2]]},
        "tie_word_embeddings": model.tied,
        "bos_token_id": IDS["<|endoftext|>"],
        "eos_token_id": IDS["<|im_end|>"],
        "image_token_id": IDS["<|image_pad|>"],
        "video_token_id": IDS["<|video_pad|>"],
        "vision_start_token_id": IDS["<|vision_start|>"],
        "vision_end_token_id": IDS["<|vision_end|>"],
        "vision_config": {
            "depth": model.tower_layers,
            "embed_dim": model.tower_width,
            "num_heads": model.tower_heads,
            "mlp_ratio": 4,
            "hidden_size": model.hidden,
            "in_channels": 3,
            "patch_size": PIXELS["patch_size"],
            "spatial_merge_size": PIXELS["merge_size"],
            "temporal_patch_size": PIXELS["temporal_patch_size"],
        },
    }
