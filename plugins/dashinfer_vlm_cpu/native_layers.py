"""Run all layers of a decoder in one call to C.

Releasing and acquiring the GIL around each operation, and the Python code in between, took a tenth of a step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dashinfer_vlm_core.kernels.types import (
    Additions,
    Attention,
    DecoderLayer,
    DecoderShape,
    ForwardBatch,
    Linear,
    LoraLayer,
    LoraLayers,
    LoraRows,
    LowRank,
    Mlp,
    Norm,
)

from .native_linear import NativeLinear, fields

_LONG = ctypes.c_int64
_POINTER = ctypes.c_void_p


class CLayer(ctypes.Structure):
    """`DecoderLayer` with attention and an MLP in C."""

    _fields_ = fields("p input_norm qkv output mlp_norm gate_up down query_norm key_norm")


class CDecoderShape(ctypes.Structure):
    """`DecoderShape` in C."""

    _fields_ = fields("l heads kv_heads width, f scale eps")


MAX_KEPT_ROWS = 64
"""Workspaces for at most this many rows are kept for the next step, which probably has as many; about a megabyte."""

MAX_PARTS = 3
ALIGNMENT = 64


class CLowRank(ctypes.Structure):
    """`LowRank` in C."""

    _fields_ = (
        ("down", _POINTER), ("up", _POINTER * MAX_PARTS), ("first_input", _LONG * MAX_PARTS),
        ("first_output", _LONG * MAX_PARTS),
    )  # fmt: skip


class CLoraLayer(ctypes.Structure):
    """`LoraLayer` in C."""

    _fields_ = (("qkv", CLowRank), ("output", CLowRank), ("gate_up", CLowRank), ("down", CLowRank))


class CLoraRows(ctypes.Structure):
    """`LoraRows` in C."""

    _fields_ = fields("p layers, l start stop last_start last_stop")


class CForwardBatch(ctypes.Structure):
    """`ForwardBatch` in C."""

    _fields_ = fields(
        "p x, l rows hidden, p cos sin slots spans, l span_count, p last, l last_count,"
        " p last_spans, l last_span_count, p out cache cache_scales, l cache_rows,"
        " p normed qkv mixed inner linear_workspace attend_workspace,"
        " p additions addition_rows, l addition_count levels level_stride addition_stride,"
        " p adapters, l adapter_count, p row_bias ranks, l ranks_stride,"
        " p adapter_workspace, l adapter_workspace_size"
    )


class NativeLayers:
    """See `DecoderLayers`. The KV cache is bfloat16, or int8 with scales."""

    def __init__(self, library: ctypes.CDLL, layers: Sequence[DecoderLayer], shape: DecoderShape) -> None:
        self._library = library
        self._layers = tuple(layers)
        parts = (part for layer in layers for part in (*_attention(layer), *_mlp(layer)))
        linears = [part for part in parts if isinstance(part, NativeLinear)]
        self._workspace_users = list({linear.workspace_key: linear for linear in linears}.values())
        self._table = (CLayer * len(layers))(*map(_c_layer, layers))
        self._shape = CDecoderShape(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5, shape.eps)
        self._loras: WeakKeyDictionary[LoraLayers, _NativeLora] = WeakKeyDictionary()
        self._kept_workspaces: tuple[tuple[int, int, int], list[Tensor]] | None = None

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        assert all(part.is_contiguous() for part in (x, batch.cos, batch.sin, batch.slots, batch.last, batch.cache))
        assert batch.cache.dtype == (x.dtype if batch.cache_scales is None else torch.int8)
        assert batch.cache_scales is None or batch.cache_scales.is_contiguous()
        rows, hidden = x.shape
        out = torch.empty(len(batch.last), hidden, dtype=x.dtype)
        workspaces = self._kept_or_new_workspaces(rows, hidden)
        spans = batch.spans.table
        last_spans = batch.last_spans.table
        loras = self._lora_arguments(batch.loras, rows)
        description = CForwardBatch(
            x.data_ptr(), rows, hidden, batch.cos.data_ptr(), batch.sin.data_ptr(), batch.slots.data_ptr(),
            spans.data_ptr(), len(spans), batch.last.data_ptr(), len(batch.last), last_spans.data_ptr(),
            len(last_spans), out.data_ptr(), batch.cache.data_ptr(),
            None if batch.cache_scales is None else batch.cache_scales.data_ptr(), batch.cache.shape[2],
            *(workspace.data_ptr() for workspace in workspaces),
            *_c_additions(batch.additions),
            *map(_pointer, loras),
        )  # fmt: skip
        self._library.run_layers(
            self._table, len(self._table), ctypes.byref(self._shape), ctypes.byref(description), torch.get_num_threads()
        )
        return out

    def _lora_arguments(self, loras: Sequence[LoraRows], rows: int) -> tuple[Any, ...]:
        if not loras:
            return None, 0, None, None, 0, None, 0
        found = [self._native_lora(part.lora) for part in loras]
        table = (CLoraRows * len(loras))(
            *(CLoraRows(ctypes.addressof(lora.table), *part[1:]) for part, lora in zip(loras, found, strict=True))
        )
        biased = rows - loras[0].start
        ranks = max(lora.ranks for lora in found)
        users = [linear for lora in found for linear in lora.workspace_users]
        size = max((linear.workspace_bytes(rows) for linear in users), default=0)
        size = -(-size // ALIGNMENT) * ALIGNMENT
        return (
            table, len(table), torch.empty(biased, max(lora.outputs for lora in found), dtype=torch.float32),
            torch.empty(rows, ranks, dtype=torch.bfloat16), ranks,
            torch.empty(torch.get_num_threads() * size, dtype=torch.uint8), size,
        )  # fmt: skip

    def _native_lora(self, lora: LoraLayers) -> _NativeLora:
        if lora not in self._loras:
            self._loras[lora] = _NativeLora.of(lora)
        return self._loras[lora]

    def _kept_or_new_workspaces(self, rows: int, hidden: int) -> list[Tensor]:
        key = rows, hidden, torch.get_num_threads()
        kept = self._kept_workspaces
        if kept is not None and kept[0] == key:
            return kept[1]
        workspaces = self._workspaces(rows, hidden)
        self._kept_workspaces = (key, workspaces) if rows <= MAX_KEPT_ROWS else None
        return workspaces

    def _workspaces(self, rows: int, hidden: int) -> list[Tensor]:
        linears = self._workspace_users
        heads, kv_heads, width = self._shape.heads, self._shape.kv_heads, self._shape.width
        columns = hidden, (heads + 2 * kv_heads) * width, heads * width, max(linear.inputs for linear in linears)
        sizes = (
            max(linear.workspace_bytes(rows) for linear in linears),
            torch.get_num_threads() * self._library.attend_workspace_size(width),
        )
        return [
            *(torch.empty(rows, count, dtype=torch.bfloat16) for count in columns),
            *(torch.empty(count, dtype=torch.uint8) for count in sizes),
        ]


class _NativeLora(NamedTuple):
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
    def of(cls, lora: LoraLayers) -> _NativeLora:
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


def _c_low_rank(change: LowRank | None) -> CLowRank:
    if change is None:
        return CLowRank()
    parts = change.parts
    return CLowRank(
        _address(change.down),
        (_POINTER * MAX_PARTS)(*(_address(part.up) for part in parts)),
        (_LONG * MAX_PARTS)(*(part.first_input for part in parts)),
        (_LONG * MAX_PARTS)(*(part.first_output for part in parts)),
    )


def _c_lora_layer(layer: LoraLayer) -> CLoraLayer:
    return CLoraLayer(*map(_c_low_rank, (layer.qkv, layer.output, layer.gate_up, layer.down)))


def _pointer(part: Tensor | ctypes.Array[Any] | int | None) -> int | None:
    if isinstance(part, Tensor):
        return part.data_ptr()
    return ctypes.addressof(part) if isinstance(part, ctypes.Array) else part


def _c_additions(additions: Additions | None) -> tuple[int | None, ...]:
    if additions is None:
        return None, None, 0, 0, 0, 0
    rows, values = additions
    assert rows.is_contiguous()
    assert values.stride(2) == 1
    assert values.dtype == torch.bfloat16
    levels, count, _ = values.shape
    return values.data_ptr(), rows.data_ptr(), count, levels, values.stride(0), values.stride(1)


def _c_layer(layer: DecoderLayer) -> CLayer:
    qkv, output, query_norm, key_norm = _attention(layer)
    parts = (layer.input_norm, qkv, output, layer.mlp_norm, *_mlp(layer), query_norm, key_norm)
    return CLayer(*map(_address, parts))


def _attention(layer: DecoderLayer) -> Attention:
    assert isinstance(layer.mixer, Attention)
    return layer.mixer


def _mlp(layer: DecoderLayer) -> Mlp:
    assert isinstance(layer.mlp, Mlp)
    return layer.mlp


def _address(part: Norm | Linear | None) -> int | None:
    if part is None:
        return None
    if isinstance(part, Norm):
        return part.weight.data_ptr()
    assert isinstance(part, NativeLinear)
    return ctypes.addressof(part.matrix)
