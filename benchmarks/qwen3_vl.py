"""Checkpoints of Qwen3-VL for benchmarks: real shapes, random weights, the published file layout."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.checkpoint_files import IDS, vision_token_ids, write_json, write_tokenizer
from benchmarks.checkpoint_files import TEMPLATE as QWEN2_TEMPLATE

from .random_weights import save_random_weights

VOCABULARY = 151_936
TEMPLATE = "{% for message in messages %}" + QWEN2_TEMPLATE.partition("{% endif %}")[2]
"""Without a default system message."""
PATCHES = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
IMAGE_SIZE = {"longest_edge": 16_777_216, "shortest_edge": 65_536}
VIDEO_SIZE = {"longest_edge": 25_165_824, "shortest_edge": 4_096}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The dimensions of a dense model. The defaults are those of 2B and 4B."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int = 8
    vision_width: int = 1024
    vision_inner: int = 4096
    vision_layers: int = 24
    levels: tuple[int, ...] = (5, 11, 17)


SHAPES = {
    "qwen3-vl-2b": Shape(hidden=2048, inner=6144, layers=28, heads=16),
    "qwen3-vl-4b": Shape(hidden=2560, inner=9728, layers=36, heads=32),
}


def write_model(shape: Shape, folder: Path) -> None:
    """Write configuration, weights (bfloat16) and tokenizer in the layout of the published checkpoints."""
    from transformers import Qwen3VLConfig

    config = Qwen3VLConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.inner,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": 128,
            "max_position_embeddings": 262_144,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
            "bos_token_id": IDS["<|endoftext|>"],
            "eos_token_id": IDS["<|im_end|>"],
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": shape.vision_layers,
            "hidden_size": shape.vision_width,
            "intermediate_size": shape.vision_inner,
            "num_heads": 16,
            "out_hidden_size": shape.hidden,
            "deepstack_visual_indexes": list(shape.levels),
        },
        **vision_token_ids(),
        tie_word_embeddings=True,
    )
    save_random_weights(config, folder)
    _publish_config(folder / "config.json")
    write_processors(folder)


def write_processors(folder: Path) -> None:
    """Write the files of images, videos and text."""
    write_json(folder / "preprocessor_config.json", PATCHES | {"size": IMAGE_SIZE})
    write_json(folder / "video_preprocessor_config.json", PATCHES | {"size": VIDEO_SIZE})
    write_tokenizer(folder)
    write_json(folder / "chat_template.json", {"chat_template": TEMPLATE})


def _publish_config(file: Path) -> None:
    """Give the rotary options of `config.json` the names of the published files."""
    config = json.loads(file.read_text())
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    write_json(file, config)
