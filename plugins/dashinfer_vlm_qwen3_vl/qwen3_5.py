"""Parse `config.json` of a Qwen3.5 checkpoint; its other files are those of Qwen3-VL."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from dashinfer_vlm_core.models.files import listed_tensors
from dashinfer_vlm_core.models.json_fields import JsonFields
from dashinfer_vlm_core.models.qwen2_vl.config import (
    attention_spec,
    read_config,
    rope_fields,
    shared_text_model,
    text_fields,
)
from dashinfer_vlm_core.models.spec import ModelSpec
from dashinfer_vlm_core.text_spec import (
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    TextModelSpec,
    TextWeightNames,
)
from dashinfer_vlm_core.tokenization.conversation import QWEN_XML

from .config import HYBRID_TOKENS, HYBRID_TYPES, Qwen3VLVisionConfig, interleaved_axes, published_spec, vision_config

logger: logging.Logger = logging.getLogger(__name__)

ATTENTION, DELTA_NET = "full_attention", "linear_attention"
SUPPORTED = {"attention_bias": False, "attn_output_gate": True, "mlp_only_layers": [], "output_gate_type": "swish"}
HEAD_DIM = 256
ATTENTION_INTERVAL = 4
ROTATED = 0.25
"""transformers' default values."""

MAX_CONV_WIDTH = 64
"""Kernels have an array of this length on their stack; published models have 4."""


def read_spec(folder: Path) -> ModelSpec:
    """Read the `ModelSpec` of the checkpoint in `folder`.

    Raises:
        CheckpointError: a file is missing or invalid, files contradict each other, or they require an unsupported
            feature.
    """
    config = read_config(folder, *HYBRID_TYPES, tokens=HYBRID_TOKENS)
    spec = published_spec(config, _text_model(config), read_vision_config(folder))
    return replace(spec, conversation=QWEN_XML)


def read_vision_config(folder: Path) -> Qwen3VLVisionConfig:
    """Read the vision encoder's configuration of the checkpoint in `folder`.

    Raises:
        CheckpointError: `config.json` is missing or invalid, or requires an unsupported feature.
    """
    vision = read_config(folder, *HYBRID_TYPES).section("vision_config")
    if vision.get("deepstack_visual_indexes"):
        vision.fail("deepstack_visual_indexes", "is not empty", "Only vision encoders without DeepStack are supported.")
    return vision_config(vision, ())


def _text_model(config: JsonFields) -> TextModelSpec:
    text = text_fields(config)
    for name, expected in SUPPORTED.items():
        if text.get(name) not in (None, expected):
            text.fail(name, f"is {text.get(name)!r}", f"Only {expected!r} is supported.")
    mixers: dict[str, AttentionSpec | DeltaNetSpec] = {ATTENTION: _attention(text), DELTA_NET: _delta_net(text)}
    mlp = _mlp(text, is_moe=config.get("model_type") == HYBRID_TYPES[1])
    layers = [LayerSpec(mixer=mixers[kind], mlp=mlp) for kind in _layer_types(text)]
    # `mtp_num_hidden_layers` says nothing: fine-tuned checkpoints keep the field without the weights.
    mtp_layer = LayerSpec(mixer=mixers[ATTENTION], mlp=mlp) if _has_mtp(config.file.parent, mlp) else None
    return replace(shared_text_model(config, layers), norm_offset=1, mtp_layer=mtp_layer)


def _has_mtp(folder: Path, mlp: MlpSpec | ExpertsSpec) -> bool:
    """Whether the checkpoint has all modules of the head for multi-token prediction."""
    names = TextWeightNames()
    stored = [name for name in listed_tensors(folder) if name.startswith(f"{names.mtp}.")]
    if not any(name.startswith(f"{names.mtp}.{names.mtp_fc}.") for name in stored):  # its weights may be quantized
        return False
    missing = [module for module in _mtp_modules(names, mlp) if not any(name.startswith(module) for name in stored)]
    if missing:
        logger.warning(
            "%s lacks %s of its head for multi-token prediction, which is not used.",
            folder,
            ", ".join(module.removesuffix(".") for module in missing),
        )
    return not missing


def _mtp_modules(names: TextWeightNames, mlp: MlpSpec | ExpertsSpec) -> list[str]:
    """Return the prefixes of the tensors of each module; those of experts are stored in several ways."""
    norms = (names.mtp_embedding_norm, names.mtp_hidden_norm, names.mtp_norm)
    projections = (names.query, names.key, names.value, names.output)
    parts = [names.input_norm, names.mlp_norm, names.query_norm, names.key_norm, *projections]
    if isinstance(mlp, MlpSpec):
        parts += names.mlp
    else:
        parts += [names.router, names.shared_router, names.shared_gate, names.shared_up, names.shared_down]
        parts.append(names.experts_gate_up.rpartition(".")[0])
    layer = names.mtp_layer.format(0)
    return [f"{names.mtp}.{name}." for name in (*norms, *(f"{layer}.{part}" for part in parts))]


def _layer_types(text: JsonFields) -> list[str]:
    count = text.integer("num_hidden_layers")
    interval = text.integer("full_attention_interval", default=ATTENTION_INTERVAL)
    types = text.get("layer_types")
    if types is None:
        types = [DELTA_NET if (number + 1) % interval else ATTENTION for number in range(count)]
    if not isinstance(types, list) or len(types) != count or not set(types) <= {ATTENTION, DELTA_NET}:
        text.fail("layer_types", f"must be {count} of {ATTENTION!r} and {DELTA_NET!r}, got {types!r}")
    if ATTENTION not in types:
        text.fail("layer_types", f"has no {ATTENTION!r}", "Only models with attention are supported.")
    return types


def _attention(text: JsonFields) -> AttentionSpec:
    rope = rope_fields(text)
    source = rope if rope.get("partial_rotary_factor") is not None else text
    rotated = ROTATED if source.get("partial_rotary_factor") is None else source.number("partial_rotary_factor")
    return attention_spec(text, interleaved_axes(text), head_dim=HEAD_DIM, rotated=rotated, head_norms=True, gate=True)


def _delta_net(text: JsonFields) -> DeltaNetSpec:
    spec = DeltaNetSpec(
        num_key_heads=text.integer("linear_num_key_heads"),
        num_value_heads=text.integer("linear_num_value_heads"),
        key_dim=text.integer("linear_key_head_dim"),
        value_dim=text.integer("linear_value_head_dim"),
        conv_width=text.integer("linear_conv_kernel_dim"),
    )
    if spec.conv_width > MAX_CONV_WIDTH:
        text.fail("linear_conv_kernel_dim", f"is {spec.conv_width}, above the maximum of {MAX_CONV_WIDTH}")
    if spec.num_value_heads % spec.num_key_heads:
        text.fail("linear_num_key_heads", f"does not divide `linear_num_value_heads` {spec.num_value_heads}")
    return spec


def _mlp(text: JsonFields, *, is_moe: bool) -> MlpSpec | ExpertsSpec:
    if not is_moe:
        return MlpSpec(intermediate_size=text.integer("intermediate_size"))
    spec = ExpertsSpec(
        num_experts=text.integer("num_experts"),
        experts_per_token=text.integer("num_experts_per_tok"),
        intermediate_size=text.integer("moe_intermediate_size"),
        shared_intermediate_size=text.integer("shared_expert_intermediate_size"),
    )
    if spec.experts_per_token > spec.num_experts:
        text.fail("num_experts_per_tok", f"is above `num_experts` {spec.num_experts}")
    return spec
