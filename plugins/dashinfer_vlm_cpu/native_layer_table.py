"""The layers of a decoder as structures of the C kernels, see decoder_layers.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from dashinfer_vlm_core.kernels.types import Attention, DecoderLayer, DecoderShape, DeltaNet, Linear, Mlp, Norm

from .native_delta_net import DeltaArgs, c_delta_net
from .native_linear import NativeLinear, fields


class CLayer(ctypes.Structure):
    """`DecoderLayer` with an MLP in C."""

    _fields_ = fields("p input_norm qkv output mlp_norm gate_up down query_norm key_norm gates delta")


class CDecoderShape(ctypes.Structure):
    """`DecoderShape` in C."""

    _fields_ = fields("l heads kv_heads width gate_heads, f scale eps")


class _Linears(NamedTuple):
    """The linear layers of a layer; `qkv` is the first one of its mixer, and only delta nets have `gates`."""

    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear
    gates: Linear | None = None


def _linears(mixer: Attention | DeltaNet, mlp: Mlp) -> _Linears:
    if isinstance(mixer, DeltaNet):
        return _Linears(mixer.qkvz, mixer.output, *mlp, mixer.gates)
    return _Linears(mixer.qkv, mixer.output, *mlp)


def supports_layers(layers: Sequence[DecoderLayer]) -> bool:
    """Whether the C kernels can run these layers."""
    specs = {layer.mixer.spec for layer in layers if isinstance(layer.mixer, DeltaNet)}
    return len(specs) <= 1 and all(map(_supports_layer, layers))


def _supports_layer(layer: DecoderLayer) -> bool:
    mixer = layer.mixer
    if not isinstance(layer.mlp, Mlp):
        return False
    head_norms = (mixer.query_norm, mixer.key_norm) if isinstance(mixer, Attention) else (None, None)
    norms = [norm for norm in (layer.input_norm, layer.mlp_norm, *head_norms) if norm]
    return (
        (head_norms[0] is None) == (head_norms[1] is None)
        and all(norm.bias is None for norm in norms)
        and all(isinstance(linear, NativeLinear) for linear in _linears(mixer, layer.mlp) if linear)
    )


class LayerTable:
    """Layers that `supports_layers` accepts, as an array in C.

    Attributes:
        table: the layers.
        nets: their delta nets.
        linears: linear layers with different workspaces, of which the largest is needed.
        widths: the numbers of columns of the intermediate results `normed`, `qkv`, `mixed` and `inner`.
        gates: that of `gates`.
    """

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        self._layers = tuple(layers)  # the array has addresses in them
        self.nets: list[DeltaNet] = [layer.mixer for layer in layers if isinstance(layer.mixer, DeltaNet)]
        self._delta_args = [c_delta_net(net) for net in self.nets]
        rest = iter(self._delta_args)
        self.table: ctypes.Array[CLayer] = (CLayer * len(layers))(
            *(_c_layer(layer, next(rest) if isinstance(layer.mixer, DeltaNet) else None) for layer in layers)
        )
        parts = [_native_linears(layer) for layer in layers]
        self.linears: list[NativeLinear] = list({part.workspace_key: part for row in parts for part in row}.values())
        first, output, _, down = (list(column) for column in zip(*(row[:4] for row in parts), strict=True))
        self.widths: tuple[int, ...] = (
            first[0].inputs,
            max(linear.columns for linear in first),
            max(linear.inputs for linear in output),
            max(linear.inputs for linear in down),
        )
        self.gates: int = 2 * self.nets[0].spec.num_value_heads if self.nets else 0


def c_shape(shape: DecoderShape) -> CDecoderShape:
    """Return a shape in C."""
    gate_heads = shape.heads if shape.gate else 0
    scale = shape.head_dim**-0.5
    return CDecoderShape(shape.heads, shape.kv_heads, shape.head_dim, gate_heads, scale, shape.eps)


def _native_linears(layer: DecoderLayer) -> list[NativeLinear]:
    assert isinstance(layer.mlp, Mlp)
    return [linear for linear in _linears(layer.mixer, layer.mlp) if isinstance(linear, NativeLinear)]


def _c_layer(layer: DecoderLayer, delta: DeltaArgs | None) -> CLayer:
    mixer = layer.mixer
    assert isinstance(layer.mlp, Mlp)
    parts: dict[str, Norm | Linear | None] = {"input_norm": layer.input_norm, "mlp_norm": layer.mlp_norm}
    parts |= _linears(mixer, layer.mlp)._asdict()
    if isinstance(mixer, Attention):
        parts |= {"query_norm": mixer.query_norm, "key_norm": mixer.key_norm}
    addresses = {name: _address(part) for name, part in parts.items()}
    return CLayer(**addresses, delta=None if delta is None else ctypes.addressof(delta))


def _address(part: Norm | Linear | None) -> int | None:
    if part is None:
        return None
    if isinstance(part, Norm):
        return part.weight.data_ptr()
    assert isinstance(part, NativeLinear)
    return ctypes.addressof(part.matrix)
