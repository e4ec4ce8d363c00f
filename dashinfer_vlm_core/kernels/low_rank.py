"""What adapters add to a linear layer, computed for the tokens of each adapter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .types import LoraRows, LowRank


def row_bias(additions: Sequence[tuple[LoraRows, LowRank | None]], x: Tensor) -> Tensor | None:
    """Compute what adapters add to the products of a linear layer.

    A row's values do not depend on the other rows, if those of the adapters' linear layers do not.

    Args:
        additions: the rows of each adapter in order, and what it adds to the layer.
        x: the input of the layer, [rows, inputs].

    Returns:
        float32 [count, outputs], the values to add to the last `count` rows; None if no adapter changes the layer.
    """
    changed = [(rows, low_rank) for rows, low_rank in additions if low_rank and rows.start < rows.stop]
    if not changed:
        return None
    first = changed[0][0].start
    bias = torch.zeros(len(x) - first, changed[0][1].outputs, dtype=torch.float32, device=x.device)
    for rows, low_rank in changed:
        ranks = low_rank.down(x[rows.start : rows.stop])
        for part in low_rank.parts:
            columns = slice(part.first_output, part.first_output + part.outputs)
            inputs = ranks[:, part.first_input : part.first_input + part.inputs]
            bias[rows.start - first : rows.stop - first, columns] = part.up(inputs)
    return bias
