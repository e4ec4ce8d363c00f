"""Adapters as structures of the C kernels, see decoder_linear.h."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dashinfer_vlm_core.kernels.types import Linear, LoraLayer, LoraLayers, LowRank

from .native_linear import NativeLinear, fields

MAX_PARTS = 3


class CLowRank(ctypes.Structure):
    """`LowRank` in C."""

    _fields_ = (
        ("down", ctypes.c_void_p), ("up", ctypes.c_void_p * MAX_PARTS), ("first_input", ctypes.c_int64 * MAX_PARTS),
        ("first_output", ctypes.c_int64 * MAX_PARTS),
    )  # fmt: skip


class CLoraLayer(ctypes.Structure):
    """`LoraLayer` in C."""

    _fields_ = (
        ("qkv", CLowRank), ("output", CLowRank), ("gate_up", CLowRank), ("down", CLowRank), ("gates", CLowRank),
    )  # fmt: skip


class CLoraRows(ctypes.Structure):
    """`LoraRows` in C."""

    _fields_ = fields("p layers, l start stop last_start last_stop")


class NativeLora(NamedTuple):
    """An adapter in C.

    Attributes:
        table: its layers.
        ranks: maximum number of outputs of the first factors.
        outputs: maximum number of outputs of the linear layers that it changes.
        workspace_users: linear layers with different workspaces, of which the largest is needed.
    """

    table: ctypes.Array[CLoraLayer]
    ranks: int
    outputs: int
    workspace_users: Sequence[NativeLinear]

    @classmethod
    def of(cls, lora: LoraLayers) -> NativeLora:
        changes = [change for layer in lora.layers for change in layer if change]
        linears = {linear.workspace_key: linear for change in changes for linear in _linears(change)}
        return cls(
            (CLoraLayer * len(lora.layers))(*map(_c_lora_layer, lora.layers)),
            max((linear.columns for change in changes for linear in _linears(change, parts=False)), default=0),
            max((change.outputs for change in changes), default=0),
            list(linears.values()),
        )


def _linears(change: LowRank, *, parts: bool = True) -> Iterator[NativeLinear]:
    for linear in (change.down, *(part.up for part in change.parts if parts)):
        assert isinstance(linear, NativeLinear)
        yield linear


def _matrix(linear: Linear) -> int:
    assert isinstance(linear, NativeLinear)
    return ctypes.addressof(linear.matrix)


def _c_low_rank(change: LowRank | None) -> CLowRank:
    if change is None:
        return CLowRank()
    parts = change.parts
    return CLowRank(
        _matrix(change.down),
        (ctypes.c_void_p * MAX_PARTS)(*(_matrix(part.up) for part in parts)),
        (ctypes.c_int64 * MAX_PARTS)(*(part.first_input for part in parts)),
        (ctypes.c_int64 * MAX_PARTS)(*(part.first_output for part in parts)),
    )


def _c_lora_layer(layer: LoraLayer) -> CLoraLayer:
    return CLoraLayer(*map(_c_low_rank, (layer.qkv, layer.output, layer.gate_up, layer.down, layer.gates)))
