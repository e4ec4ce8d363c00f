"""Read the configuration of EAGLE-3 heads (arXiv:2503.01840), which draft tokens from hidden states of three layers.

A head is a checkpoint of its own, as SpecForge and the authors of EAGLE publish it:

    config.json          the fields of a Llama of one layer; `draft_vocab_size`, and which layers it reads
    fc                   projects the three hidden states of a token, concatenated, to the hidden size
    midlayer             the layer: its attention reads the embedding of the next token and the projected hidden state,
                         which `input_layernorm` and `hidden_norm` normalize
    norm, lm_head        the norm and the output layer, with a row per token of the draft vocabulary
    d2t                  what to add to the index of such a row to get the token; `t2d` is not read
    embed_tokens         only if the embeddings are not the model's
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..text_spec import AttentionSpec, LayerSpec, MlpSpec, RotarySpec, TextModelSpec, TextWeightNames
from .json_fields import CONFIG, JsonFields, read_fields

RENAMES = ((r"^model\.", ""), (r"^layers\.0\.", "midlayer."))
"""Map the names of tensors in other versions of the layout to those above."""

NUM_HIDDEN_STATES = 3

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_OTHER_HEAD = "Set `speculative_model` to a head that was trained for this model, or remove it."


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleSpec:
    """An EAGLE-3 head.

    Attributes:
        folder: the folder with its files.
        text: the head as a text model: its layer, and an output layer with a row per token of the draft vocabulary.
        target_layers: the numbers of layers of the model after which it reads hidden states.
        adds_normalized: whether the layer adds its outputs to the hidden state after `hidden_norm`, instead of the one
            before.
    """

    folder: Path
    text: TextModelSpec
    target_layers: tuple[int, ...]
    adds_normalized: bool


def is_eagle(folder: Path) -> bool:
    """Whether the checkpoint in a folder is an EAGLE-3 head. Raise CheckpointError if its configuration is invalid."""
    config = read_fields(folder / CONFIG)
    names = config.get("architectures")
    has_name = isinstance(names, list) and any("eagle3" in str(name).lower() for name in names)
    return has_name or config.get("draft_vocab_size") is not None


def read_eagle(folder: Path, target: TextModelSpec) -> EagleSpec:
    """Read a head for a text model.

    Raises:
        CheckpointError: a field is missing or invalid, or requires another model or an unsupported feature.
    """
    config = read_fields(folder / CONFIG).with_defaults({"rope_theta": 10000.0})
    if config.get("speculators_config") is not None:
        config.fail("speculators_config", "is the layout of speculators", "Use a head in the layout of SpecForge.")
    _check_fields(config, target)
    mlp = MlpSpec(intermediate_size=config.integer("intermediate_size"))
    text = TextModelSpec(
        hidden_size=target.hidden_size,
        layers=(LayerSpec(mixer=_attention(config), mlp=mlp),),
        vocab_size=config.integer("draft_vocab_size", default=config.integer("vocab_size")),
        max_position_embeddings=target.max_position_embeddings,
        norm_eps=config.number("rms_norm_eps"),
        tie_word_embeddings=False,
        weights=TextWeightNames(embedding="embed_tokens", norm="norm", layer="midlayer"),
    )
    return EagleSpec(
        folder=folder,
        text=text,
        target_layers=_target_layers(config, len(target.layers)),
        adds_normalized=config.flag("norm_before_residual"),
    )


def _check_fields(config: JsonFields, target: TextModelSpec) -> None:
    for name, expected in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if config.integer(name) != expected:
            config.fail(name, f"is {config.integer(name)}, but the model's is {expected}", _OTHER_HEAD)
    if config.integer("target_hidden_size", default=target.hidden_size) != target.hidden_size:
        config.fail("target_hidden_size", f"is not the model's hidden size, {target.hidden_size}", _OTHER_HEAD)
    supported: tuple[tuple[str, Any], ...] = (("num_hidden_layers", 1), ("hidden_act", "silu"))
    for name, value in supported:
        if config.get(name) not in (None, value):
            config.fail(name, f"is {config.get(name)!r}", f"Only {value!r} is supported: use another head.")
    for name in ("attention_bias", "mlp_bias"):
        if config.flag(name):
            config.fail(name, "is true", "Only projections without biases are supported: use another head.")


def _attention(config: JsonFields) -> AttentionSpec:
    heads = config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", default=config.integer("hidden_size") // heads)
    spec = AttentionSpec(
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", default=heads),
        head_dim=head_dim,
        rotary=_rotary(config, head_dim),
    )
    if heads % spec.num_kv_heads:
        config.fail("num_key_value_heads", f"does not divide `num_attention_heads` {heads}")
    return spec


def _target_layers(config: JsonFields, count: int) -> tuple[int, ...]:
    """Return after how many layers hidden states are read.

    vLLM counts layers at the top level of the configuration; SpecForge and SGLang name layers in `eagle_config`, whose
    outputs are read.
    """
    if config.get(_LAYER_IDS) is not None:
        fields, offset = config, 0
    elif config.get("eagle_config") is not None and config.section("eagle_config").get(_LAYER_IDS) is not None:
        fields, offset = config.section("eagle_config"), 1
    else:
        fields, offset = config.with_defaults({_LAYER_IDS: [2, count // 2, count - 3]}), 0
    ids = fields.get(_LAYER_IDS)
    layers = tuple(number + offset for number in ids) if _is_integers(ids) else ()
    if len(layers) != NUM_HIDDEN_STATES or not all(0 < number < count for number in layers):
        fields.fail(_LAYER_IDS, f"is {ids!r}, not three of the model's {count} layers", _OTHER_HEAD)
    return layers


def _is_integers(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _rotary(config: JsonFields, head_dim: int) -> RotarySpec:
    name = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    rope = JsonFields(file=config.file, values={}) if config.get(name) is None else config.section(name)
    for field in ("type", "rope_type"):
        if rope.get(field) not in (None, "mrope", "default"):
            rope.fail(field, f"is {rope.get(field)!r}", "Only plain rotary embedding and M-RoPE are supported.")
    theta = (rope if rope.get("rope_theta") is not None else config).number("rope_theta")
    axes = _axes(rope) if rope.get("mrope_section") is not None else (0,) * (head_dim // 2)
    if 2 * len(axes) != head_dim:
        rope.fail("mrope_section", f"does not add up to half of `head_dim` {head_dim}")
    return RotarySpec(theta=theta, axes=axes)


def _axes(rope: JsonFields) -> tuple[int, ...]:
    """Return the axis of each frequency: in blocks, or height and width take turns with time, which has the rest."""
    section = rope.integers("mrope_section")
    if not rope.flag("mrope_interleaved"):
        return tuple(axis for axis, count in enumerate(section) for _ in range(count))
    turns = {index: axis for axis in (1, 2) for index in range(axis, 3 * section[axis], 3)}
    return tuple(turns.get(index, 0) for index in range(sum(section)))
