"""The tensors of the published checkpoints, by name and shape, and checkpoints in their layout with random weights.

Source: `model.safetensors.index.json` of Qwen's repositories. Sizes are symbols, so that a table describes every size;
`{}` is the index of a layer or block, and `[]` that of a DeepStack merger.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from tests import tiny
from tests.qwen3_5 import tiny_qwen3_5
from tests.qwen3_vl import tiny_qwen3


def _with_bias(name: str, outputs: str, inputs: str = "") -> dict[str, str]:
    return {f"{name}.weight": f"{outputs} {inputs}".strip(), f"{name}.bias": outputs}


_ATTENTION = {**_with_bias("blocks.{}.attn.qkv", "3*d", "d"), **_with_bias("blocks.{}.attn.proj", "d", "d")}

QWEN2_VISION = {
    "patch_embed.proj.weight": "d 3 2 p p",
    **_with_bias("blocks.{}.norm1", "d"),
    **_with_bias("blocks.{}.norm2", "d"),
    **_ATTENTION,
    **_with_bias("blocks.{}.mlp.fc1", "f", "d"),
    **_with_bias("blocks.{}.mlp.fc2", "d", "f"),
    **_with_bias("merger.ln_q", "d"),
    **_with_bias("merger.mlp.0", "4*d", "4*d"),
    **_with_bias("merger.mlp.2", "h", "4*d"),
}
QWEN2_5_VISION = {
    "patch_embed.proj.weight": "d 3 2 p p",
    "blocks.{}.norm1.weight": "d",
    "blocks.{}.norm2.weight": "d",
    **_ATTENTION,
    **_with_bias("blocks.{}.mlp.gate_proj", "f", "d"),
    **_with_bias("blocks.{}.mlp.up_proj", "f", "d"),
    **_with_bias("blocks.{}.mlp.down_proj", "d", "f"),
    "merger.ln_q.weight": "d",
    **_with_bias("merger.mlp.0", "4*d", "4*d"),
    **_with_bias("merger.mlp.2", "h", "4*d"),
}
QWEN3_VISION = {
    **_with_bias("patch_embed.proj", "d", "3 2 p p"),
    "pos_embed.weight": "positions d",
    **_with_bias("blocks.{}.norm1", "d"),
    **_with_bias("blocks.{}.norm2", "d"),
    **_ATTENTION,
    **_with_bias("blocks.{}.mlp.linear_fc1", "f", "d"),
    **_with_bias("blocks.{}.mlp.linear_fc2", "d", "f"),
    **_with_bias("merger.norm", "d"),
    **_with_bias("merger.linear_fc1", "4*d", "4*d"),
    **_with_bias("merger.linear_fc2", "h", "4*d"),
    **_with_bias("deepstack_merger_list.[].norm", "4*d"),
    **_with_bias("deepstack_merger_list.[].linear_fc1", "4*d", "4*d"),
    **_with_bias("deepstack_merger_list.[].linear_fc2", "h", "4*d"),
}

_NORMS = {
    "embed_tokens.weight": "v h",
    "norm.weight": "h",
    "layers.{}.input_layernorm.weight": "h",
    "layers.{}.post_attention_layernorm.weight": "h",
    "layers.{}.self_attn.o_proj.weight": "h heads*c",
}
_MLP = {
    "layers.{}.mlp.gate_proj.weight": "i h",
    "layers.{}.mlp.up_proj.weight": "i h",
    "layers.{}.mlp.down_proj.weight": "h i",
}
QWEN2_TEXT = {
    **_NORMS,
    **_with_bias("layers.{}.self_attn.q_proj", "heads*c", "h"),
    **_with_bias("layers.{}.self_attn.k_proj", "kv*c", "h"),
    **_with_bias("layers.{}.self_attn.v_proj", "kv*c", "h"),
    **_MLP,
}
_QWEN3_ATTENTION = {
    **_NORMS,
    "layers.{}.self_attn.q_proj.weight": "heads*c h",
    "layers.{}.self_attn.k_proj.weight": "kv*c h",
    "layers.{}.self_attn.v_proj.weight": "kv*c h",
    "layers.{}.self_attn.q_norm.weight": "c",
    "layers.{}.self_attn.k_norm.weight": "c",
}
QWEN3_TEXT = {**_QWEN3_ATTENTION, **_MLP}
_QWEN3_5_LAYERS = {
    "embed_tokens.weight": "v h",
    "norm.weight": "h",
    "layers.{}.input_layernorm.weight": "h",
    "layers.{}.post_attention_layernorm.weight": "h",
    "layers.{attention}.self_attn.q_proj.weight": "2*heads*c h",
    "layers.{attention}.self_attn.k_proj.weight": "kv*c h",
    "layers.{attention}.self_attn.v_proj.weight": "kv*c h",
    "layers.{attention}.self_attn.o_proj.weight": "h heads*c",
    "layers.{attention}.self_attn.q_norm.weight": "c",
    "layers.{attention}.self_attn.k_norm.weight": "c",
    "layers.{delta}.linear_attn.A_log": "lv",
    "layers.{delta}.linear_attn.dt_bias": "lv",
    "layers.{delta}.linear_attn.conv1d.weight": "conv 1 w",
    "layers.{delta}.linear_attn.in_proj_a.weight": "lv h",
    "layers.{delta}.linear_attn.in_proj_b.weight": "lv h",
    "layers.{delta}.linear_attn.in_proj_qkv.weight": "conv h",
    "layers.{delta}.linear_attn.in_proj_z.weight": "lv*vd h",
    "layers.{delta}.linear_attn.norm.weight": "vd",
    "layers.{delta}.linear_attn.out_proj.weight": "h lv*vd",
}
QWEN3_5_TEXT = {**_QWEN3_5_LAYERS, **_MLP}
QWEN3_5_MOE_TEXT = {
    **_QWEN3_5_LAYERS,
    "layers.{}.mlp.gate.weight": "experts h",
    "layers.{}.mlp.experts.gate_up_proj": "experts 2*e h",
    "layers.{}.mlp.experts.down_proj": "experts h e",
    "layers.{}.mlp.shared_expert.gate_proj.weight": "s h",
    "layers.{}.mlp.shared_expert.up_proj.weight": "s h",
    "layers.{}.mlp.shared_expert.down_proj.weight": "h s",
    "layers.{}.mlp.shared_expert_gate.weight": "1 h",
}
QWEN3_MOE_TEXT = {
    **_QWEN3_ATTENTION,
    "layers.{}.mlp.gate.weight": "experts h",
    "layers.{}.mlp.experts.gate_up_proj": "experts h 2*e",
    "layers.{}.mlp.experts.down_proj": "experts e h",
}

OLD = ("visual.", "model.")
"""Prefixes of the vision encoder and of the text model in the checkpoints of Qwen2-VL and Qwen2.5-VL."""
NEW = ("model.visual.", "model.language_model.")
"""The prefixes in the checkpoints of Qwen3-VL, and of the parameters of all families in transformers since 4.52."""


class Layout(NamedTuple):
    """The layout of one published checkpoint.

    Attributes:
        family: which of the small models is stored in it.
        prefixes: `OLD` or `NEW`.
        shards: number of files; a single one has no index.
        tied: whether the output layer is the embedding table, and not stored.
    """

    family: str
    prefixes: tuple[str, str]
    shards: int
    tied: bool


LAYOUTS = {
    "Qwen2-VL-2B-Instruct": Layout("qwen2_vl", OLD, 2, tied=True),
    "Qwen2-VL-7B-Instruct": Layout("qwen2_vl", OLD, 5, tied=False),
    "Qwen2-VL-7B-Instruct with new names": Layout("qwen2_vl", NEW, 4, tied=False),
    "Qwen2.5-VL-3B-Instruct": Layout("qwen2_5_vl", OLD, 2, tied=True),
    "Qwen2.5-VL-7B-Instruct": Layout("qwen2_5_vl", OLD, 5, tied=False),
    "Qwen2.5-VL-7B-Instruct with new names": Layout("qwen2_5_vl", NEW, 4, tied=False),
    "Qwen3-VL-2B-Instruct": Layout("qwen3_vl", NEW, 1, tied=True),
    "Qwen3-VL-8B-Instruct": Layout("qwen3_vl", NEW, 4, tied=False),
    "Qwen3-VL-30B-A3B-Instruct": Layout("qwen3_vl_moe", NEW, 13, tied=False),
    "Qwen3.5-4B": Layout("qwen3_5", NEW, 2, tied=True),
    "Qwen3.5-35B-A3B": Layout("qwen3_5_moe", NEW, 14, tied=False),
}
TABLES = {
    "qwen2_vl": (QWEN2_VISION, QWEN2_TEXT),
    "qwen2_5_vl": (QWEN2_5_VISION, QWEN2_TEXT),
    "qwen3_vl": (QWEN3_VISION, QWEN3_TEXT),
    "qwen3_vl_moe": (QWEN3_VISION, QWEN3_MOE_TEXT),
    "qwen3_5": (QWEN3_VISION, QWEN3_5_TEXT),
    "qwen3_5_moe": (QWEN3_VISION, QWEN3_5_MOE_TEXT),
}


def write_small(family: str, folder: Path, *, tied: bool) -> Path:
    """Write a small random model of a family, in a single file."""
    if family == "qwen2_vl":
        return tiny.write_checkpoint(folder, tie_word_embeddings=tied)
    if family == "qwen2_5_vl":
        return tiny.write_qwen2_5_vl(folder, tie_word_embeddings=tied)
    if family == "qwen3_vl":
        return tiny_qwen3.write_checkpoint(folder, tie_word_embeddings=tied)
    if family.startswith("qwen3_5"):
        return tiny_qwen3_5.write_checkpoint(folder, moe=family == "qwen3_5_moe", tie_word_embeddings=tied)
    # Every layer of the published model has experts.
    return tiny_qwen3.write_checkpoint(folder, moe=True, tie_word_embeddings=tied, mlp_only_layers=[])


def published_tensors(layout: Layout, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a published checkpoint, in the order in which its shards store them, if its
    `config.json` were `config`."""
    text, vision = config.get("text_config", config), config["vision_config"]
    sizes = _sizes(text, vision)
    kinds = text.get("layer_types") or []
    numbers = {
        "{attention}": [number for number, kind in enumerate(kinds) if kind == "full_attention"],
        "{delta}": [number for number, kind in enumerate(kinds) if kind == "linear_attention"],
        "[]": range(len(vision.get("deepstack_visual_indexes") or ())),
    }
    counts = {"text": text["num_hidden_layers"], "vision": vision["depth"]}
    tensors: dict[str, tuple[int, ...]] = {}
    for part, prefix, table in zip(("vision", "text"), layout.prefixes, TABLES[layout.family], strict=True):
        for pattern, shape in table.items():
            place = next((place for place in (*numbers, "{}") if place in pattern), "")
            for number in {**numbers, "{}": range(counts[part])}.get(place, range(1)):
                name = pattern.replace(place, str(number)) if place else pattern
                tensors[prefix + name] = tuple(_product(term, sizes) for term in shape.split())
    if layout.family.startswith("qwen3_5"):
        head = _mtp_head(TABLES[layout.family][1])
        tensors |= {name: tuple(_product(term, sizes) for term in shape.split()) for name, shape in head.items()}
    return tensors if layout.tied else tensors | {"lm_head.weight": (sizes["v"], sizes["h"])}


def _mtp_head(text: Mapping[str, str]) -> dict[str, str]:
    """Return the head for multi-token prediction of a text model: norms, a projection and a layer with attention."""
    names = {re.sub(r"^layers\.{(attention)?}", "mtp.layers.0", name): shape for name, shape in text.items()}
    norms = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    return {
        "mtp.fc.weight": "h 2*h",
        **{f"{name}.weight": "h" for name in norms},
        **{name: shape for name, shape in names.items() if name.startswith("mtp.")},
    }


def _sizes(text: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, int]:
    """Return the value of each symbol of the tables."""
    width = vision["embed_dim"] if "embed_dim" in vision else vision["hidden_size"]
    heads = text["num_attention_heads"]
    return {
        "d": width,
        "f": vision["intermediate_size"] if "intermediate_size" in vision else int(width * vision["mlp_ratio"]),
        "p": vision.get("patch_size", 14),
        "positions": vision.get("num_position_embeddings", 0),
        "h": text["hidden_size"],
        "i": text.get("intermediate_size") or 0,
        "v": text["vocab_size"],
        "c": text.get("head_dim") or text["hidden_size"] // heads,
        "heads": heads,
        "kv": text["num_key_value_heads"],
        "experts": text.get("num_experts") or text.get("num_local_experts") or 0,
        "e": text.get("moe_intermediate_size") or 0,
        "s": text.get("shared_expert_intermediate_size") or 0,
        **_delta_net_sizes(text),
    }


def _delta_net_sizes(text: Mapping[str, Any]) -> dict[str, int]:
    key_heads, value_heads = text.get("linear_num_key_heads", 0), text.get("linear_num_value_heads", 0)
    key_dim, value_dim = text.get("linear_key_head_dim", 0), text.get("linear_value_head_dim", 0)
    return {
        "lv": value_heads,
        "vd": value_dim,
        "w": text.get("linear_conv_kernel_dim", 0),
        "conv": 2 * key_heads * key_dim + value_heads * value_dim,
    }


def _product(term: str, sizes: Mapping[str, int]) -> int:
    return math.prod(int(factor) if factor.isdigit() else sizes[factor] for factor in term.split("*"))


def publish(small: Path, layout: Layout, folder: Path) -> Path:
    """Write the model in `small` to `folder` in a published layout.

    Raises:
        AssertionError: the model's tensors are not those of the layout.
    """
    folder.mkdir()
    for file in small.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    # transformers 5 saves the weights of Qwen3-VL's experts transposed.
    is_transposed = layout.family == "qwen3_vl_moe"
    stored = {
        _plain(name): tensor.transpose(1, 2).contiguous() if is_transposed and ".experts." in name else tensor
        for name, tensor in load_file(small / "model.safetensors").items()
    }
    shapes = published_tensors(layout, json.loads((small / "config.json").read_text()))
    stored |= {name: torch.zeros(shape) for name, shape in shapes.items() if name.startswith("mtp.")}
    assert {_plain(name): shape for name, shape in shapes.items()} == {
        name: tuple(tensor.shape) for name, tensor in stored.items()
    }
    _save({name: stored[_plain(name)] for name in shapes}, layout.shards, folder)
    return folder


def _plain(name: str) -> str:
    """Return a name with the prefixes of `OLD`."""
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


def _save(tensors: Mapping[str, torch.Tensor], shards: int, folder: Path) -> None:
    """Save tensors in `shards` files, in order; the last one is alone with the output layer if there is one."""
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    last = len(names) - 1 if names[-1] == "lm_head.weight" else len(names) * (shards - 1) // shards
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        begin, end = (last * edge // (shards - 1) for edge in (number, number + 1))
        part = names[last:] if number == shards - 1 else names[begin:end]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
