"""Run all layers of a decoder in one call to C.

Releasing and acquiring the GIL around each operation, and the Python code in between, took a tenth of a step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dashinfer_vlm_core.kernels.types import (
    Additions,
    DecoderLayer,
    DecoderShape,
    ForwardBatch,
    LoraLayers,
    LoraRows,
)

from .native_delta_net import NativeRecurrentBatch, delta_workspace_bytes
from .native_layer_table import LayerTable, c_shape
from .native_linear import fields
from .native_lora import CLoraRows, NativeLora

MAX_KEPT_ROWS = 64
"""Workspaces for at most this many rows are kept for the next step, which probably has as many; a few megabytes."""

ALIGNMENT = 64


class CForwardBatch(ctypes.Structure):
    """`ForwardBatch` in C."""

    _fields_ = fields(
        "p x, l rows hidden, p cos sin slots spans, l span_count, p last, l last_count,"
        " p last_spans, l last_span_count, p out cache cache_scales, l cache_rows,"
        " p normed qkv mixed inner gates linear_workspace attend_workspace delta_workspace,"
        " p additions addition_rows, l addition_count levels level_stride addition_stride,"
        " p adapters, l adapter_count, p row_bias ranks, l ranks_stride,"
        " p adapter_workspace, l adapter_workspace_size, p recurrent"
    )


class NativeLayers:
    """See `DecoderLayers`. The KV cache is bfloat16, or int8 with scales."""

    def __init__(self, library: ctypes.CDLL, layers: Sequence[DecoderLayer], shape: DecoderShape) -> None:
        self._library = library
        self._layers = LayerTable(layers)
        self._shape = c_shape(shape)
        self._loras: WeakKeyDictionary[LoraLayers, NativeLora] = WeakKeyDictionary()
        self._kept_workspaces: tuple[tuple[int, int], list[Tensor]] | None = None

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        assert all(part.is_contiguous() for part in (x, batch.cos, batch.sin, batch.slots, batch.last, batch.cache))
        assert batch.cache.dtype == (x.dtype if batch.cache_scales is None else torch.int8)
        assert batch.cache_scales is None or batch.cache_scales.is_contiguous()
        rows, hidden = x.shape
        out = torch.empty(len(batch.last), hidden, dtype=x.dtype)
        workspaces = self._kept_or_new_workspaces(rows)
        spans = batch.spans.table
        last_spans = batch.last_spans.table
        loras = self._lora_arguments(batch.loras, rows)
        recurrent = self._recurrent(batch)
        description = CForwardBatch(
            x.data_ptr(), rows, hidden, batch.cos.data_ptr(), batch.sin.data_ptr(), batch.slots.data_ptr(),
            spans.data_ptr(), len(spans), batch.last.data_ptr(), len(batch.last), last_spans.data_ptr(),
            len(last_spans), out.data_ptr(), batch.cache.data_ptr(),
            None if batch.cache_scales is None else batch.cache_scales.data_ptr(), batch.cache.shape[2],
            *(workspace.data_ptr() for workspace in workspaces),
            *_c_additions(batch.additions),
            *map(_pointer, loras),
            recurrent and ctypes.addressof(recurrent.structure),
        )  # fmt: skip
        table = self._layers.table
        self._library.run_layers(
            table, len(table), ctypes.byref(self._shape), ctypes.byref(description), torch.get_num_threads()
        )
        return out

    def _recurrent(self, batch: ForwardBatch) -> NativeRecurrentBatch | None:
        if not self._layers.nets:
            return None
        assert batch.recurrent
        return NativeRecurrentBatch(batch.recurrent, self._layers.nets)

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

    def _native_lora(self, lora: LoraLayers) -> NativeLora:
        if lora not in self._loras:
            self._loras[lora] = NativeLora.of(lora)
        return self._loras[lora]

    def _kept_or_new_workspaces(self, rows: int) -> list[Tensor]:
        key = rows, torch.get_num_threads()
        kept = self._kept_workspaces
        if kept is not None and kept[0] == key:
            return kept[1]
        workspaces = self._workspaces(rows)
        self._kept_workspaces = (key, workspaces) if rows <= MAX_KEPT_ROWS else None
        return workspaces

    def _workspaces(self, rows: int) -> list[Tensor]:
        layers = self._layers
        threads = torch.get_num_threads()
        sizes = (
            max(linear.workspace_bytes(rows) for linear in layers.linears),
            threads * self._library.attend_workspace_size(self._shape.width),
            threads * delta_workspace_bytes(self._library, layers.nets[0]) if layers.nets else 0,
        )
        return [
            *(torch.empty(rows, width, dtype=torch.bfloat16) for width in layers.widths),
            torch.empty(rows, layers.gates, dtype=torch.float32),
            *(torch.empty(size, dtype=torch.uint8) for size in sizes),
        ]


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
