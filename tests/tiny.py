"""Two-layer models with random weights in the published layout, for numerical tests: Qwen2-VL and Qwen2.5-VL."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from benchmarks.checkpoint_files import CONTROL as SPECIAL
from benchmarks.checkpoint_files import TEMPLATE, byte_level_bpe, vision_token_ids

MERGES = ("t h", "th e", "i n", "e r", "a n", "r e", "o n", "Ġ the", "Ġ a", "Ġ in", "s t", "Ċ Ċ")
IDS = {name: 256 + len(MERGES) + index for index, name in enumerate(SPECIAL)}


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE with Qwen2's normalizer and pre-tokenizer, its control tokens and a dozen merges."""
    from tokenizers import normalizers

    tokenizer = byte_level_bpe([(first, second) for first, second in map(str.split, MERGES)])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "model_max_length": 4096,
        "chat_template": TEMPLATE,
        "additional_special_tokens": list(SPECIAL[1:]),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_checkpoint(folder: Path, *, seed: int = 0, **text: Any) -> Path:
    """Write a random model to `folder`; `text` overrides fields of its text configuration."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
    config = Qwen2VLConfig(vision_config=vision, **_fields(text))
    return _write(folder, Qwen2VLForConditionalGeneration, config, seed)


def write_qwen2_5_vl(folder: Path, *, seed: int = 0, **text: Any) -> Path:
    """Write a random Qwen2.5-VL like `write_checkpoint`, with windows in half of its vision encoder's blocks.

    The largest image has 6 x 6 visual tokens, and a window 4 x 4.
    """
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 44,
        "out_hidden_size": 64,
        "num_heads": 2,
        "fullatt_block_indexes": [1, 3],
        "tokens_per_second": 2,
    }
    config = Qwen2_5_VLConfig(vision_config=vision, **_fields(text))
    # A larger scale would multiply rounding errors in the gated MLPs.
    return _write(folder, Qwen2_5_VLForConditionalGeneration, config, seed, vision_scale=1.0)


def _fields(text: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration but those of the vision encoder."""
    return {
        "text_config": {
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "bos_token_id": IDS["<|endoftext|>"],
            "eos_token_id": IDS["<|im_end|>"],
            **text,
        },
        **vision_token_ids(IDS),
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
    }


def _write(folder: Path, model_class: Any, config: Any, seed: int, *, vision_scale: float = 2.0) -> Path:
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():  # the usual 0.02 would leave attention flat and every response one repeated token
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                scale = vision_scale if name.startswith("model.visual.") else 2.0
                parameter.normal_(std=scale / math.sqrt(parameter[0].numel()))
    model.generation_config.eos_token_id = [IDS["<|im_end|>"], IDS["<|endoftext|>"]]
    model.generation_config.pad_token_id = IDS["<|endoftext|>"]
    model.save_pretrained(folder)
    pixels = {
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 84 * 84,
        "max_pixels": 168 * 168,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor",
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    return folder


def to_bfloat16(folder: Path) -> Path:
    """Round the weights of a checkpoint."""
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}))
    return folder
