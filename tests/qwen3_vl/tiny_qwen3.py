"""A small Qwen3-VL with random weights in the published layout, dense or with a mixture of experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from benchmarks.checkpoint_files import vision_token_ids, write_json
from tests.tiny import IDS, write_tokenizer

# Renders like the published template: no default system message.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATCHES = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
IMAGE_SIZE = {"shortest_edge": 64 * 64, "longest_edge": 192 * 192}
VIDEO_SIZE = {"shortest_edge": 2 * 64 * 64, "longest_edge": 8 * 128 * 128}
TEXT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": IDS["<|endoftext|>"],
    "eos_token_id": IDS["<|im_end|>"],
    "tie_word_embeddings": False,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
THETA = 1000.0
"""Small, so that the positions of short prompts matter."""


def write_checkpoint(folder: Path, *, moe: bool = False, seed: int = 0, **text: Any) -> Path:
    """Write a random model to `folder`; `text` overrides fields of its text configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    model = random_model(moe=moe, seed=seed, **text)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", published_layout(config))
    write_processors(folder)
    return folder


def write_processors(folder: Path) -> None:
    """Write the files of images, videos and text."""
    write_json(folder / "preprocessor_config.json", PATCHES | {"size": IMAGE_SIZE})
    write_json(folder / "video_preprocessor_config.json", PATCHES | {"size": VIDEO_SIZE})
    write_tokenizer(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", settings | {"chat_template": TEMPLATE})
    write_json(folder / "chat_template.json", {"chat_template": TEMPLATE})


def random_model(*, moe: bool, seed: int, **text: Any) -> torch.nn.Module:
    """Return a model whose weights are large enough for clear best tokens."""
    config = (Qwen3VLMoeConfig if moe else Qwen3VLConfig)(**config_fields(
        {
            "head_dim": 24,  # as in the published 4B, the heads are wider than the hidden size
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": THETA,
                "mrope_section": [6, 3, 3],
                "mrope_interleaved": True,
            },
            **(MOE | {"norm_topk_prob": True, "mlp_only_layers": [1]} if moe else {}),
            **text,
        },
        {"depth": 4, "deepstack_visual_indexes": [0, 2]},
    ))  # fmt: skip
    model_class = Qwen3VLMoeForConditionalGeneration if moe else Qwen3VLForConditionalGeneration
    return create_model(model_class, config, seed, _fill)


def config_fields(text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration with these fields of text model and vision encoder."""
    text = TEXT | text
    return {
        "text_config": text,
        "vision_config": VISION | vision,
        **vision_token_ids(IDS),
        "tie_word_embeddings": text["tie_word_embeddings"],
        "dtype": "float32",
    }


def create_model(model_class: Any, config: Any, seed: int, fill: Callable[[str, torch.Tensor], None]) -> Any:
    """Return a model whose parameters are filled by name."""
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            fill(name, weight)
    model.generation_config.eos_token_id = [IDS["<|im_end|>"], IDS["<|endoftext|>"]]
    model.generation_config.pad_token_id = IDS["<|endoftext|>"]
    return model


def fill_matrix(weight: torch.Tensor) -> None:
    inputs = weight.shape[-1] if weight.ndim < 4 else weight[0].numel()
    weight.normal_(std=2.0 * inputs**-0.5)


def _fill(name: str, weight: torch.Tensor) -> None:
    if weight.ndim == 1:
        weight.normal_(mean=float("norm" in name and "bias" not in name), std=0.2)
    else:
        fill_matrix(weight)


def published_layout(config: dict[str, Any]) -> dict[str, Any]:
    """Return a `config.json` of transformers 5 with the names of the published files."""
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope.pop("rope_theta")
    text["rope_scaling"] = rope
    config["vision_config"].pop("rope_parameters", None)
    return config
