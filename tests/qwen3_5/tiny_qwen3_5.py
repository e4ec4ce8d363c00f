"""A small Qwen3.5 with random weights, dense or with a mixture of experts."""

from __future__ import annotations

import json
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

from benchmarks.checkpoint_files import vision_token_ids, write_json
from tests.qwen3_vl.tiny_qwen3 import IMAGE_SIZE, PATCHES, TEMPLATE, THETA, VIDEO_SIZE
from tests.tiny import IDS, write_tokenizer

MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}


def write_checkpoint(folder: Path, *, moe: bool = False, seed: int = 0, fused: bool = True, **text: Any) -> Path:
    """Write a random model to `folder`; `text` overrides fields of its text configuration.

    The weights of the experts of a layer are `fused` in one tensor, as published, or separate, as transformers saves
    them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random_model(moe=moe, seed=seed, **text).save_pretrained(folder)
    if moe and fused:
        _fuse_experts(folder / "model.safetensors")
    write_json(folder / "preprocessor_config.json", PATCHES | {"size": IMAGE_SIZE})
    write_json(folder / "video_preprocessor_config.json", PATCHES | {"size": VIDEO_SIZE})
    write_tokenizer(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", settings | {"chat_template": TEMPLATE})
    write_json(folder / "chat_template.json", {"chat_template": TEMPLATE})
    return folder


def random_model(*, moe: bool, seed: int, **text: Any) -> torch.nn.Module:
    """Return a model whose weights are large enough for clear best tokens, and whose states last for many tokens."""
    text_config = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
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
        "bos_token_id": IDS["<|endoftext|>"],
        "eos_token_id": IDS["<|im_end|>"],
        "tie_word_embeddings": False,
        **(MOE if moe else {}),
        **text,
    }
    if moe:
        del text_config["intermediate_size"]
    vision_config = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 36,
    }
    config = (Qwen3_5MoeConfig if moe else Qwen3_5Config)(
        text_config=text_config,
        vision_config=vision_config,
        **vision_token_ids(IDS),
        tie_word_embeddings=text_config["tie_word_embeddings"],
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = (Qwen3_5MoeForConditionalGeneration if moe else Qwen3_5ForConditionalGeneration)(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            _fill(name, weight)
    model.generation_config.eos_token_id = [IDS["<|im_end|>"], IDS["<|endoftext|>"]]
    model.generation_config.pad_token_id = IDS["<|endoftext|>"]
    return model


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
        inputs = weight.shape[-1] if weight.ndim < 4 else weight[0].numel()
        weight.normal_(std=2.0 * inputs**-0.5)
