"""Gated delta nets as structures of the C kernels, see delta_inputs.h and decoder_linear.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from dashinfer_vlm_core.kernels.types import DeltaInputs, DeltaNet, RecurrentBatch, RecurrentStates, StateSpans

from .native_linear import fields

STATE_SPAN_FIELDS = 8
"""The number of values of `StateSpan` in C."""


class DeltaArgs(ctypes.Structure):
    """`DeltaArgs` in C."""

    _fields_ = fields(
        "p rows gates out conv_states states conv rate step_bias norm,"
        " l row_stride key_heads value_heads key_dim value_dim taps, f eps"
    )


class CRecurrentBatch(ctypes.Structure):
    """`RecurrentBatch` in C."""

    _fields_ = fields(
        "p conv_states states, l slots, p spans, l span_count, p lists kept_rows, l kept_count, p kept_qkvz kept_gates"
    )


def c_delta_net(net: DeltaNet) -> DeltaArgs:
    """Return the shape and weights of a layer, without inputs, output and states."""
    spec = net.spec
    weights = {"conv": net.conv, "rate": net.rate, "step_bias": net.step_bias, "norm": net.norm}
    assert all(part.is_contiguous() for part in weights.values())
    return DeltaArgs(
        **{name: part.data_ptr() for name, part in weights.items()}, key_heads=spec.num_key_heads,
        value_heads=spec.num_value_heads, key_dim=spec.key_dim, value_dim=spec.value_dim, taps=spec.conv_width,
        eps=net.eps,
    )  # fmt: skip


def mix_delta_net(
    library: ctypes.CDLL, net: DeltaNet, inputs: DeltaInputs, states: RecurrentStates, spans: StateSpans
) -> Tensor:
    """See `Kernels`."""
    assert all(part.is_contiguous() for part in (inputs.gates, *states))
    assert inputs.qkvz.stride(1) == 1
    out = torch.empty(len(inputs.qkvz), net.spec.value_width, dtype=inputs.qkvz.dtype)
    args = c_delta_net(net)
    args.rows, args.gates, args.out, args.conv_states, args.states = (
        part.data_ptr() for part in (inputs.qkvz, inputs.gates, out, *states)
    )
    args.row_stride = inputs.qkvz.stride(0)
    threads = torch.get_num_threads()
    workspace = torch.empty(threads * delta_workspace_bytes(library, net), dtype=torch.uint8)
    table, count, lists = _table(spans)
    library.mix_delta_net(ctypes.byref(args), table, count, lists, workspace.data_ptr(), threads)
    return out


def delta_workspace_bytes(library: ctypes.CDLL, net: DeltaNet) -> int:
    """Return the number of workspace bytes of each thread."""
    return int(library.delta_workspace_size(net.spec.key_dim, net.spec.value_dim))


class NativeRecurrentBatch:
    """A `RecurrentBatch` in C, and what it refers to.

    Attributes:
        structure: the structure.
    """

    def __init__(self, batch: RecurrentBatch, nets: Sequence[DeltaNet]) -> None:
        assert all(part.is_contiguous() for part in batch.states)
        assert len(batch.states.conv) == len(nets)
        spec = nets[0].spec
        drafted = [batch.spans.spans[number] for number in batch.spans.drafted]
        rows = [span.first_token + token for span in drafted for token in range(span.num_tokens)]
        kept = DeltaInputs(
            torch.empty(len(nets), len(rows), spec.conv_channels + spec.value_width, dtype=torch.bfloat16),
            torch.empty(len(nets), len(rows), 2 * spec.num_value_heads),
        )
        if rows:
            batch.kept.extend(map(DeltaInputs, *kept))
        self._rows = torch.tensor(rows, dtype=torch.int64)
        self._kept = kept
        self.structure: CRecurrentBatch = CRecurrentBatch(
            *(part.data_ptr() for part in batch.states), batch.states.conv.shape[1], *_table(batch.spans),
            self._rows.data_ptr(), len(rows), *(part.data_ptr() for part in kept),
        )  # fmt: skip


def _table(spans: StateSpans) -> tuple[int, int, int]:
    """Return the addresses of the spans, their number, and the address of the lists that follow them."""
    count = len(spans.spans)
    address = spans.table.data_ptr()
    return address, count, address + STATE_SPAN_FIELDS * count * spans.table.itemsize
