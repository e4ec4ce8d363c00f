"""Run all layers of a decoder in one call to C.

Releasing and acquiring the GIL around each operation, and the Python code in between, took a tenth of a step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from dashinfer_vlm_core.kernels.types import Additions, DecoderLayer, DecoderShape, ForwardBatch, Linear, Norm

from .native_linear import NativeLinear

_LONG, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class CLayer(ctypes.Structure):
    """`DecoderLayer` in C."""

    _fields_ = (
        ("input_norm", _POINTER), ("qkv", _POINTER), ("output", _POINTER), ("mlp_norm", _POINTER),
        ("gate_up", _POINTER), ("down", _POINTER), ("query_norm", _POINTER), ("key_norm", _POINTER),
    )  # fmt: skip


class CDecoderShape(ctypes.Structure):
    """`DecoderShape` in C."""

    _fields_ = (("heads", _LONG), ("kv_heads", _LONG), ("width", _LONG), ("scale", _FLOAT), ("eps", _FLOAT))


class CForwardBatch(ctypes.Structure):
    """`ForwardBatch` in C."""

    _fields_ = (
        ("x", _POINTER), ("rows", _LONG), ("hidden", _LONG), ("cos", _POINTER), ("sin", _POINTER), ("slots", _POINTER),
        ("spans", _POINTER), ("span_count", _LONG), ("last", _POINTER), ("last_count", _LONG), ("last_spans", _POINTER),
        ("out", _POINTER), ("cache", _POINTER), ("cache_scales", _POINTER), ("cache_rows", _LONG), ("normed", _POINTER),
        ("qkv", _POINTER), ("mixed", _POINTER), ("inner", _POINTER), ("linear_workspace", _POINTER),
        ("attend_workspace", _POINTER),
        ("additions", _POINTER), ("addition_rows", _POINTER), ("addition_count", _LONG), ("levels", _LONG),
        ("level_stride", _LONG), ("addition_stride", _LONG),
    )  # fmt: skip


class NativeLayers:
    """See `DecoderLayers`. The KV cache is bfloat16, or int8 with scales."""

    converts_cache = True

    def __init__(self, library: ctypes.CDLL, layers: Sequence[DecoderLayer], shape: DecoderShape) -> None:
        self._library = library
        self._layers = tuple(layers)
        linears = [part for layer in layers for part in layer if isinstance(part, NativeLinear)]
        self._workspace_users = list({linear.workspace_key: linear for linear in linears}.values())
        self._table = (CLayer * len(layers))(*map(_c_layer, layers))
        self._shape = CDecoderShape(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5, shape.eps)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        assert all(part.is_contiguous() for part in (x, batch.cos, batch.sin, batch.slots, batch.last, batch.cache))
        assert batch.cache.dtype == (x.dtype if batch.cache_scales is None else torch.int8)
        assert batch.cache_scales is None or batch.cache_scales.is_contiguous()
        rows, hidden = x.shape
        out = torch.empty(len(batch.last), hidden, dtype=x.dtype)
        workspaces = self._workspaces(rows, hidden)
        spans, last_spans = batch.spans.table, batch.last_spans.table
        description = CForwardBatch(
            x.data_ptr(), rows, hidden, batch.cos.data_ptr(), batch.sin.data_ptr(), batch.slots.data_ptr(),
            spans.data_ptr(), len(spans), batch.last.data_ptr(), len(batch.last), last_spans.data_ptr(),
            out.data_ptr(), batch.cache.data_ptr(),
            None if batch.cache_scales is None else batch.cache_scales.data_ptr(), batch.cache.shape[2],
            *(workspace.data_ptr() for workspace in workspaces),
            *_c_additions(batch.additions),
        )  # fmt: skip
        self._library.run_layers(
            self._table, len(self._table), ctypes.byref(self._shape), ctypes.byref(description), torch.get_num_threads()
        )
        return out

    def _workspaces(self, rows: int, hidden: int) -> list[Tensor]:
        """Allocate memory for a layer's intermediate results, in the order of `CForwardBatch`."""
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


def _c_additions(additions: Additions | None) -> tuple[int | None, ...]:
    """Return the last fields of `CForwardBatch`."""
    if additions is None:
        return None, None, 0, 0, 0, 0
    rows, values = additions
    assert rows.is_contiguous()
    assert values.stride(2) == 1
    assert values.dtype == torch.bfloat16
    levels, count, _ = values.shape
    return values.data_ptr(), rows.data_ptr(), count, levels, values.stride(0), values.stride(1)


def _c_layer(layer: DecoderLayer) -> CLayer:
    return CLayer(
        input_norm=_address(layer.input_norm),
        qkv=_address(layer.qkv),
        output=_address(layer.output),
        mlp_norm=_address(layer.mlp_norm),
        gate_up=_address(layer.gate_up),
        down=_address(layer.down),
        query_norm=_address(layer.query_norm),
        key_norm=_address(layer.key_norm),
    )


def _address(part: Norm | Linear | None) -> int | None:
    if part is None:
        return None
    if isinstance(part, Norm):
        return part.weight.data_ptr()
    assert isinstance(part, NativeLinear)
    return ctypes.addressof(part.matrix)
