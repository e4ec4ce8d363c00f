"""A small Qwen3.5 with random weights, dense or with a mixture of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from tests.qwen3_vl import tiny_qwen3
from tests.qwen3_vl.tiny_qwen3 import THETA, config_fields, create_model, fill_matrix, write_processors

MOE = tiny_qwen3.MOE | {"shared_expert_intermediate_size": 56}


def write_checkpoint(folder: Path, *, moe: bool = False, seed: int = 0, fused: bool = True, **text: Any) -> Path:
    """Write a random model to `folder`; `text` overrides fields of its text configuration.

    The weights of the experts of a layer are `fused` in one tensor, as published, or separate, as transformers saves
    them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random_model(moe=moe, seed=seed, **text).save_pretrained(folder)
    if moe and fused:
        _fuse_experts(folder / "model.safetensors")
    write_processors(folder)
    return folder


def random_model(*, moe: bool, seed: int, **text: Any) -> torch.nn.Module:
    """Return a model whose weights are large enough for clear best tokens, and whose states last for many tokens."""
    fields = config_fields(
        {
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "linear_conv_kernel_dim": 4,
            "max_position_embeddings": 16384,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": THETA,
                "partial_rotary_factor": 0.5,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
            **(MOE if moe else {}),
            **text,
        },
        {"depth": 2},
    )
    if moe:
        del fields["text_config"]["intermediate_size"]
    config = (Qwen3_5MoeConfig if moe else Qwen3_5Config)(**fields)
    model_class = Qwen3_5MoeForConditionalGeneration if moe else Qwen3_5ForConditionalGeneration
    return create_model(model_class, config, seed, _fill)


def _fuse_experts(file: Path) -> None:
    tensors = load_file(file)
    prefixes = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    for prefix in sorted(prefixes):
        parts = [
            [tensors.pop(f"{prefix}.experts.{number}.{part}.weight") for number in range(MOE["num_experts"])]
            for part in ("gate_proj", "up_proj", "down_proj")
        ]
        gate, up, down = map(torch.stack, parts)
        tensors[f"{prefix}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        tensors[f"{prefix}.experts.down_proj"] = down
    save_file(tensors, file, {"format": "pt"})


def _fill(name: str, weight: torch.Tensor) -> None:
    if name.endswith("A_log"):
        weight.uniform_(-5, 0)
    elif name.endswith("linear_attn.norm.weight") or (".visual." in name and "norm" in name and "bias" not in name):
        weight.normal_(mean=1.0, std=0.2)  # without an offset
    elif weight.ndim == 1:
        weight.normal_(std=0.2)
    else:
        fill_matrix(weight)
