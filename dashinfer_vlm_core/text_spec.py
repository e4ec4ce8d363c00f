"""TextModelSpec: a text model as data, which kernels, model families and decoders share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class RotarySpec:
    """Rotary position embedding of the text model (arXiv:2104.09864), along several axes (M-RoPE, arXiv:2409.12191).

    Attributes:
        theta: base of the frequencies `theta ** (-2 i / head_dim)`.
        axes: for each frequency, the position axis that it rotates by: 0 is time, 1 height, 2 width.
        pairs: which columns of a head are rotated together: `halves` are (i, i + head_dim / 2), `neighbors` are
            (2 i, 2 i + 1).
    """

    theta: float
    axes: tuple[int, ...]
    pairs: Literal["halves", "neighbors"] = "halves"

    @property
    def sections(self) -> tuple[int, int, int] | None:
        """Numbers of frequencies for time, height and width if `axes` is contiguous in this order; else None."""
        time, height, width = (self.axes.count(axis) for axis in range(3))
        in_blocks = (0,) * time + (1,) * height + (2,) * width == self.axes
        return (time, height, width) if in_blocks else None


@dataclass(frozen=True, kw_only=True, slots=True)
class TextWeightNames:
    """Names of the text model's tensors after `ModelSpec.tensor_renames`, without the suffix `.weight`.

    Attributes:
        layer: prefix of a layer, where `{}` is its index; the attributes after this one are names within a layer.
        experts_gate_up: the gate and up projections of all experts, stored as one tensor, as in the next one.
        expert_gate: a layer of one expert, where `{}` is its index, as in the next two: most quantized checkpoints
            store experts separately.
    """

    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{}"
    input_norm: str = "input_layernorm"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    output: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    experts_gate_up: str = "mlp.experts.gate_up_proj"
    experts_down: str = "mlp.experts.down_proj"
    expert_gate: str = "mlp.experts.{}.gate_proj"
    expert_up: str = "mlp.experts.{}.up_proj"
    expert_down: str = "mlp.experts.{}.down_proj"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsSpec:
    """The mixture of experts that replaces the MLP of some layers (arXiv:2101.03961; top-k as in arXiv:2505.09388).

    A router computes one logit per expert. The experts with the largest softmax probabilities, in float32, are gated
    MLPs; their outputs are added with these probabilities, divided by their sum.

    Attributes:
        num_experts: number of experts of a layer.
        experts_per_token: number of experts that compute a token.
        intermediate_size: inner size of an expert.
        dense_layers: indices of the layers with an ordinary MLP of `TextModelSpec.intermediate_size`.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    dense_layers: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class TextModelSpec:
    """The text model as data: decoders build their layers from it, or report what they do not support.

    A pre-norm transformer with grouped-query attention and a gated MLP (`silu(gate) * up`).

    Attributes:
        head_dim: size of one attention head.
        num_key_value_heads: divides `num_attention_heads`.
        norm: type of all norms: those of the layers, of queries and keys, and the final one; without biases.
        qkv_bias: whether the query, key and value projections have biases.
        qk_norm: whether queries and keys are normalized per head before rotary embedding.
        tie_word_embeddings: whether the output layer shares the embedding table.
        visual_levels: rows of `hidden_size` that a visual token has in addition to its embedding. The first is added
            to its hidden state after the first layer, the second after the second, and so on (DeepStack,
            arXiv:2406.04334); fewer than the number of layers.
        experts: the mixture of experts of its layers; None if all have an ordinary MLP.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    rotary: RotarySpec
    tie_word_embeddings: bool
    norm: Literal["rms_norm", "layer_norm"] = "rms_norm"
    qkv_bias: bool = True
    qk_norm: bool = False
    visual_levels: int = 0
    experts: ExpertsSpec | None = None
    weights: TextWeightNames = TextWeightNames()

    @property
    def visual_width(self) -> int:
        """Width of a visual token's row: the embedding followed by the additional levels."""
        return self.hidden_size * (1 + self.visual_levels)
