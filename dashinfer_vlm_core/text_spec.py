"""TextModelSpec: a text model as data, which kernels, model families and decoders share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class RotarySpec:
    """Rotary position embedding of the text model (arXiv:2104.09864), along several axes (M-RoPE, arXiv:2409.12191).

    Attributes:
        theta: base of the frequencies `theta ** (-2 i / columns)`.
        axes: for each frequency, the position axis that it rotates by: 0 is time, 1 height, 2 width.
        pairs: which columns of a head are rotated together: `halves` are (i, i + columns / 2), `neighbors` are
            (2 i, 2 i + 1).
    """

    theta: float
    axes: tuple[int, ...]
    pairs: Literal["halves", "neighbors"] = "halves"

    @property
    def columns(self) -> int:
        """Number of leading columns of a head that are rotated; the others keep their values."""
        return 2 * len(self.axes)

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
        delta_rate: stored without a suffix, as is `delta_step_bias`.
        layer: prefix of a layer, where `{}` is its index; the attributes after this one are names within a layer.
        experts_gate_up: the gate and up projections of all experts, stored as one tensor, as in the next one.
        expert_gate: a layer of one expert, where `{}` is its index, as in the next two: most quantized checkpoints
            store experts separately.
        mtp: prefix of the head for multi-token prediction; the attributes after this one are names within it.
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
    delta_qkv: str = "linear_attn.in_proj_qkv"
    delta_z: str = "linear_attn.in_proj_z"
    delta_beta: str = "linear_attn.in_proj_b"
    delta_step: str = "linear_attn.in_proj_a"
    delta_conv: str = "linear_attn.conv1d"
    delta_rate: str = "linear_attn.A_log"
    delta_step_bias: str = "linear_attn.dt_bias"
    delta_norm: str = "linear_attn.norm"
    delta_output: str = "linear_attn.out_proj"
    experts_gate_up: str = "mlp.experts.gate_up_proj"
    experts_down: str = "mlp.experts.down_proj"
    expert_gate: str = "mlp.experts.{}.gate_proj"
    expert_up: str = "mlp.experts.{}.up_proj"
    expert_down: str = "mlp.experts.{}.down_proj"
    shared_gate: str = "mlp.shared_expert.gate_proj"
    shared_up: str = "mlp.shared_expert.up_proj"
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_router: str = "mlp.shared_expert_gate"
    mtp: str = "mtp"
    mtp_embedding_norm: str = "pre_fc_norm_embedding"
    mtp_hidden_norm: str = "pre_fc_norm_hidden"
    mtp_fc: str = "fc"
    mtp_layer: str = "layers.{}"
    mtp_norm: str = "norm"

    @property
    def mlp(self) -> tuple[str, str, str]:
        """The gate, up and down projections of an MLP."""
        return self.gate, self.up, self.down

    @property
    def shared_expert(self) -> tuple[str, str, str]:
        """The gate, up and down projections of a shared expert."""
        return self.shared_gate, self.shared_up, self.shared_down


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """Grouped-query attention (arXiv:2305.13245).

    Attributes:
        num_kv_heads: divides `num_heads`.
        head_dim: size of a head.
        bias: whether the query, key and value projections have biases.
        head_norms: whether queries and keys are normalized per head before rotary embedding.
        gate: whether the query projection also returns a gate after each query head, whose sigmoid multiplies the
            output of the head (arXiv:2505.06708).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: RotarySpec
    bias: bool = False
    head_norms: bool = False
    gate: bool = False

    @property
    def outputs(self) -> tuple[int, int, int]:
        """Numbers of outputs of the query projection, with the gate, and of the key and value projections."""
        keys = self.num_kv_heads * self.head_dim
        return (2 if self.gate else 1) * self.width, keys, keys

    @property
    def width(self) -> int:
        """Size of all query heads together."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaNetSpec:
    """A gated delta net (arXiv:2412.06464): linear attention with a state of constant size.

    Attributes:
        num_value_heads: a multiple of `num_key_heads`; consecutive value heads share a key head.
        key_dim: size of a key head, and of a query head.
        value_dim: size of a value head.
        conv_width: number of tokens that the causal convolution over queries, keys and values spans.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def value_width(self) -> int:
        """Size of all value heads together."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Number of values of queries, keys and values together."""
        return 2 * self.num_key_heads * self.key_dim + self.value_width


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpSpec:
    """A gated MLP, `silu(gate) * up`."""

    intermediate_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsSpec:
    """A mixture of experts (arXiv:2101.03961; top-k as in arXiv:2505.09388).

    A router computes one logit per expert. The experts with the largest softmax probabilities, in float32, are gated
    MLPs; their outputs are added with these probabilities, divided by their sum.

    Attributes:
        num_experts: number of experts of a layer.
        experts_per_token: number of experts that compute a token.
        intermediate_size: inner size of an expert.
        shared_intermediate_size: inner size of an additional expert that computes all tokens and whose output is
            multiplied by the sigmoid of a gate; 0 without one.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One layer: a norm before the mixer, which connects the tokens of a sequence, and another one before the MLP."""

    mixer: AttentionSpec | DeltaNetSpec
    mlp: MlpSpec | ExpertsSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class TextModelSpec:
    """The text model as data: decoders build their layers from it, or report what they do not support.

    Attributes:
        layers: at least one has attention; all mixers of a type are equal.
        norm: type of all norms: those of the layers, of queries and keys, and the final one; without biases.
        norm_offset: added to the stored weights of these norms.
        tie_word_embeddings: whether the output layer shares the embedding table.
        visual_levels: rows of `hidden_size` that a visual token has in addition to its embedding. The first is added
            to its hidden state after the first layer, the second after the second, and so on (DeepStack,
            arXiv:2406.04334); fewer than the number of layers.
        mtp_layer: the layer of the checkpoint's head for multi-token prediction, with the mixer of `attention`; None
            without such a head. Of several layers, the first one, which is trained for the next but one token.
    """

    hidden_size: int
    layers: tuple[LayerSpec, ...]
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    tie_word_embeddings: bool
    norm: Literal["rms_norm", "layer_norm"] = "rms_norm"
    norm_offset: int = 0
    visual_levels: int = 0
    mtp_layer: LayerSpec | None = None
    weights: TextWeightNames = TextWeightNames()

    def __post_init__(self) -> None:
        mixers = {layer.mixer for layer in self.layers}
        for kind, least in ((AttentionSpec, 1), (DeltaNetSpec, 0)):
            count = sum(isinstance(mixer, kind) for mixer in mixers)
            if not least <= count <= 1:
                raise ValueError(f"`layers` must have {'one' if least else 'at most one'} {kind.__name__}, got {count}")

    @property
    def attention(self) -> AttentionSpec:
        return next(layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionSpec))

    @property
    def delta_net(self) -> DeltaNetSpec | None:
        return next((layer.mixer for layer in self.layers if isinstance(layer.mixer, DeltaNetSpec)), None)

    @property
    def num_attention_layers(self) -> int:
        return sum(isinstance(layer.mixer, AttentionSpec) for layer in self.layers)

    @property
    def num_cache_layers(self) -> int:
        """Number of layers with keys and values; the last one is that of the head for multi-token prediction, if there
        is one."""
        return self.num_attention_layers + (self.mtp_layer is not None)

    @property
    def num_delta_net_layers(self) -> int:
        return len(self.layers) - self.num_attention_layers

    @property
    def visual_width(self) -> int:
        """Width of a visual token's row: the embedding followed by the additional levels."""
        return self.hidden_size * (1 + self.visual_levels)
