"""Checkpoints of Qwen3.5 for benchmarks: real shapes, random weights, the published file layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.checkpoint_files import IDS, vision_token_ids, write_json

from .qwen3_vl import TEMPLATE, write_processors
from .random_weights import save_random_weights

VOCABULARY = 248_320
NO_REASONING = "assistant\n<think>\n\n</think>\n\n"
"""The generation prompt without reasoning, of which only the first line is repeated in later turns."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The dimensions of a dense model. The defaults are those of 0.8B and 2B."""

    hidden: int
    inner: int
    layers: int = 24
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 256
    sections: tuple[int, int, int] = (11, 11, 10)
    key_heads: int = 16
    value_heads: int = 16
    value_dim: int = 128
    vision_width: int = 1024
    vision_inner: int = 4096
    vision_layers: int = 24
    vision_heads: int = 16


SHAPES = {
    "qwen3.5-0.8b": Shape(
        hidden=1024, inner=3584, vision_width=768, vision_inner=3072, vision_layers=12, vision_heads=12
    ),
    "qwen3.5-2b": Shape(hidden=2048, inner=6144),
    "qwen3.5-4b": Shape(hidden=2560, inner=9216, layers=32, heads=16, kv_heads=4, value_heads=32),
}


def write_model(shape: Shape, folder: Path) -> None:
    """Write configuration, weights (bfloat16) and tokenizer in the layout of the published checkpoints."""
    from transformers import Qwen3_5Config

    config = Qwen3_5Config(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.inner,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "linear_num_key_heads": shape.key_heads,
            "linear_num_value_heads": shape.value_heads,
            "linear_key_head_dim": shape.value_dim,
            "linear_value_head_dim": shape.value_dim,
            "max_position_embeddings": 262_144,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_section": list(shape.sections),
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
            "num_heads": shape.vision_heads,
            "out_hidden_size": shape.hidden,
        },
        **vision_token_ids(),
        tie_word_embeddings=True,
    )
    save_random_weights(config, folder)
    write_processors(folder)
    _write_reasoning(folder)


def _write_reasoning(folder: Path) -> None:
    """Add the tags of reasoning to tokenizer and chat template."""
    from tokenizers import AddedToken, Tokenizer

    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in ("<think>", "</think>")])
    tokenizer.save(file)
    write_json(folder / "chat_template.json", {"chat_template": TEMPLATE.replace("assistant\n", NO_REASONING)})
