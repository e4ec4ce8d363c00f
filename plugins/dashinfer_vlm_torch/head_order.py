"""The order of the rows of query, key and value projections that the kernels require.

Kernels rotate the columns i and i + head_dim / 2 of a head together, and gates precede all queries. Products of queries
and keys do not change if the columns of both are permuted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dashinfer_vlm_core.text_spec import AttentionSpec


def row_orders(spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices of the stored rows of the query, key and value projection in the kernels' order, int64."""
    queries = torch.arange(spec.outputs[0]).view(spec.num_heads, -1, spec.head_dim)
    keys, values = (torch.arange(count).view(-1, spec.head_dim) for count in spec.outputs[1:])
    columns = column_order(spec)
    gates = queries[:, 1:].flatten()
    return torch.cat([gates, queries[:, 0, columns].flatten()]), keys[:, columns].flatten(), values.flatten()


def column_order(spec: AttentionSpec) -> Tensor:
    """Return the indices of the stored columns of a query or key head in the kernels' order, int64 [head_dim]."""
    columns, count = torch.arange(spec.head_dim), spec.rotary.columns
    rotated, others = columns[:count], columns[count:]
    halves = (rotated[::2], rotated[1::2]) if spec.rotary.pairs == "neighbors" else rotated.chunk(2)
    middle = len(others) // 2
    return torch.cat([halves[0], others[:middle], halves[1], others[middle:]])
