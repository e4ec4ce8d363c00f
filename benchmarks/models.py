"""Checkpoints for benchmarks: real shapes, random weights. Their output is meaningless; their cost is realistic."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.checkpoint_files import IDS, PIXELS, vision_token_ids, write_json, write_tokenizer
from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.errors import CheckpointError
from dashinfer_vlm_core.models.checkpoint import find_model
from dashinfer_vlm_core.plugins import load_plugins

from . import qwen3_5, qwen3_vl
from .random_weights import save_random_weights

CACHE = EngineConfig().cache_folder / "benchmarks" / "models"
"""The default folder of created models."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The dimensions of a model.

    Attributes:
        family: its `model_type`.
        vision_inner: size of the MLP in the vision encoder of Qwen2.5-VL; that of Qwen2-VL is four times as wide as the
            vision encoder.
        vocabulary: size of the embedding table.
        tied: whether the head has the weights of the embedding table.
    """

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    sections: tuple[int, int, int]
    vision_width: int
    vision_layers: int
    vision_heads: int
    family: Literal["qwen2_vl", "qwen2_5_vl"] = "qwen2_vl"
    vision_inner: int = 0
    vocabulary: int = 151_936
    tied: bool = True


SHAPES = {
    # Qwen2-0.5B's text model with half of Qwen2-VL's vision encoder: 582 M parameters.
    "small": Shape(
        hidden=896, inner=4864, layers=24, heads=14, kv_heads=2, sections=(8, 12, 12),
        vision_width=640, vision_layers=16, vision_heads=8,
    ),
    # MinerU2.5-2509-1.2B, which reads documents: Qwen2-0.5B with the vision encoder of Qwen2-VL.
    "mineru2.5": Shape(
        hidden=896, inner=4864, layers=24, heads=14, kv_heads=2, sections=(8, 12, 12),
        vision_width=1280, vision_layers=32, vision_heads=16,
    ),
    # Qwen2-VL-2B.
    "2b": Shape(
        hidden=1536, inner=8960, layers=28, heads=12, kv_heads=2, sections=(16, 24, 24),
        vision_width=1280, vision_layers=32, vision_heads=16,
    ),
    # Qwen2.5-VL-3B.
    "qwen2.5-vl-3b": Shape(
        hidden=2048, inner=11008, layers=36, heads=16, kv_heads=2, sections=(16, 24, 24),
        vision_width=1280, vision_layers=32, vision_heads=16, family="qwen2_5_vl", vision_inner=3420,
    ),
    # Qwen2.5-VL-7B.
    "qwen2.5-vl-7b": Shape(
        hidden=3584, inner=18944, layers=28, heads=28, kv_heads=4, sections=(16, 24, 24),
        vision_width=1280, vision_layers=32, vision_heads=16, family="qwen2_5_vl", vision_inner=3420,
        vocabulary=152_064, tied=False,
    ),
}  # fmt: skip


def checkpoint(name: str, folder: Path = CACHE) -> Path:
    """Return the absolute path of a model: one of `model_names()`, created in `folder`, or any loadable model.

    Raises:
        SystemExit: there is no such model.
    """
    if name in model_names():
        return ensure_model(name, folder.expanduser()).absolute()
    try:
        return find_model(name, registered=load_plugins().models, revision=None).absolute()
    except CheckpointError as error:
        raise SystemExit(f"{error.message} Benchmarks also create {', '.join(model_names())}.") from error


def model_names() -> tuple[str, ...]:
    """Return the names of the models that are created on demand."""
    return (*SHAPES, *qwen3_vl.SHAPES, *qwen3_5.SHAPES)


def ensure_model(name: str, folder: Path) -> Path:
    """Return the checkpoint `name` in `folder`, created if missing; no incomplete one is left behind."""
    made = folder / name
    if not made.exists():
        print(f"making the model {name} in {made} ...", flush=True)
        draft = folder / f"{name}.part"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        if name in qwen3_vl.SHAPES:
            qwen3_vl.write_model(qwen3_vl.SHAPES[name], draft)
        elif name in qwen3_5.SHAPES:
            qwen3_5.write_model(qwen3_5.SHAPES[name], draft)
        else:
            write_model(SHAPES[name], draft)
        draft.rename(made)
    return made


def write_model(shape: Shape, folder: Path) -> None:
    """Write configuration, weights (bfloat16) and tokenizer in the layout of the published checkpoints."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        shape.family,
        text_config={
            "hidden_size": shape.hidden,
            "intermediate_size": shape.inner,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "vocab_size": shape.vocabulary,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(shape.sections)},
            "bos_token_id": IDS["<|endoftext|>"],
            "eos_token_id": IDS["<|im_end|>"],
            "tie_word_embeddings": shape.tied,
        },
        vision_config=_vision_config(shape),
        **vision_token_ids(),
        tie_word_embeddings=shape.tied,
    )
    save_random_weights(config, folder)
    write_json(folder / "config.json", _flat(json.loads((folder / "config.json").read_text()), shape))
    write_json(folder / "preprocessor_config.json", PIXELS)
    write_tokenizer(folder)


def _vision_config(shape: Shape) -> dict[str, Any]:
    common = {"depth": shape.vision_layers, "num_heads": shape.vision_heads, "in_channels": 3}
    if shape.family == "qwen2_vl":
        return common | {"embed_dim": shape.vision_width, "hidden_size": shape.hidden, "mlp_ratio": 4}
    return common | {
        "hidden_size": shape.vision_width,
        "intermediate_size": shape.vision_inner,
        "out_hidden_size": shape.hidden,
        "tokens_per_second": 2,
    }


def _flat(config: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """transformers 5 nests the text model; the published files, and other engines, have its fields at the top."""
    text = config.pop("text_config")
    for name in ("rope_parameters", "dtype", "layer_types"):
        text.pop(name, None)
        config.pop(name, None)
    config["vision_config"].pop("dtype", None)
    rope = {"type": "mrope", "mrope_section": list(shape.sections)}
    fixed = {"model_type": shape.family, "torch_dtype": "bfloat16", "rope_theta": 1e6, "rope_scaling": rope}
    return {**text, **config, **fixed}
