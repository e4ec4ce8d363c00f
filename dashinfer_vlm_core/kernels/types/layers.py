"""The layers of a decoder as data."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from .linear import Linear, Norm
from .recurrent import DeltaNet


class Experts(Protocol):
    """A mixture of experts: gated MLPs, of which a router chooses some for each row."""

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """Add the result for x [rows, hidden] to `total` [rows, hidden], in place."""


class Attention(NamedTuple):
    """The attention of a layer.

    Attributes:
        qkv: the projection to query, key and value heads, concatenated in this order; with `DecoderShape.gate`, the
            gates of the query heads come first.
        output: the output projection.
        query_norm: the norm of each query head before rotary embedding.
        key_norm: the norm of each key head before rotary embedding.
    """

    qkv: Linear
    output: Linear
    query_norm: Norm | None = None
    key_norm: Norm | None = None


class Mlp(NamedTuple):
    """A gated MLP.

    Attributes:
        gate_up: the gate and up projection with `SILU_GATE`.
        down: the projection back to the hidden size.
    """

    gate_up: Linear
    down: Linear


class SharedExpert(NamedTuple):
    """An MLP for all rows next to a mixture of experts; the sigmoid of its router multiplies its output.

    Attributes:
        mlp: the MLP.
        router: the projection to one value, float32.
    """

    mlp: Mlp
    router: Linear


class DecoderLayer(NamedTuple):
    """One layer of a decoder, see `LayerSpec`; `shared_expert` is added to the output of `mlp`."""

    input_norm: Norm
    mixer: Attention | DeltaNet
    mlp_norm: Norm
    mlp: Mlp | Experts
    shared_expert: SharedExpert | None = None


class DecoderShape(NamedTuple):
    """The shape that all layers of a decoder share.

    Attributes:
        heads: number of query heads.
        kv_heads: number of key heads, and of value heads.
        head_dim: size of a head.
        eps: epsilon of the norms.
        gate: whether a sigmoid gate multiplies the output of attention.
    """

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    gate: bool = False
