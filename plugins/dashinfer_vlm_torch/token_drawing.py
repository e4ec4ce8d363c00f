"""Sample tokens with kernels that draw from logits: they read each row three times, instead of storing the weights of
all tokens in several passes.

`top_k` and `top_p` become a floor for each row, which is found among its largest logits: smaller ones have no weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dashinfer_vlm_core.kernels import DrawnTokens, TokenDrawing

from .sampler import LogitsRow, nucleus_thresholds, uniform

WIDTHS = (128, 1024)
"""The nucleus is searched among this many of the largest logits, one after the other, and then among all."""

BLOCK = 128
"""Logits per block. The largest logits are in the blocks with the largest maxima, which are far fewer."""


class TokenDrawer:
    """Samples tokens with kernels that draw; see `sampler.Drawer`. For logits on a CPU."""

    def __init__(self, kernels: TokenDrawing) -> None:
        self._kernels = kernels

    def __call__(self, scores: Tensor, numbers: Sequence[int], rows: Sequence[LogitsRow]) -> DrawnTokens:
        index = torch.tensor(numbers, dtype=torch.int64)
        temperatures = torch.tensor([row.sampling.temperature for row in rows])
        shares = torch.tensor([uniform(row) for row in rows], dtype=torch.float64)
        floors = torch.full((len(rows),), -torch.inf)
        _apply_top_k(floors, scores, index, temperatures, [row.sampling.top_k for row in rows])
        drawn = self._kernels.draw_tokens(scores, index, temperatures, floors, shares)
        top_p = torch.tensor([row.sampling.top_p for row in rows], dtype=torch.float64)
        part = ((top_p < 1) & drawn.totals.isfinite()).nonzero()[:, 0]
        if len(part):
            subset = temperatures[part], floors[part], drawn.totals[part], top_p[part]
            nuclei = _nucleus_floors(scores[index[part]], *subset)
            again = self._kernels.draw_tokens(scores, index[part], temperatures[part], nuclei, shares[part])
            drawn.ids[part] = again.ids
        return drawn


def _apply_top_k(floors: Tensor, scores: Tensor, index: Tensor, temperatures: Tensor, top_k: Sequence[int]) -> None:
    """Set the floors of rows with `top_k` to their k-th largest quotient. Quotients equal to it are all kept."""
    limited = [number for number, k in enumerate(top_k) if 0 < k < scores.shape[-1]]
    if limited:
        largest = _largest(scores[index[limited]], max(top_k[number] for number in limited))
        ranks = torch.tensor([top_k[number] - 1 for number in limited])
        floors[limited] = largest.gather(1, ranks[:, None])[:, 0] / temperatures[limited]


def _nucleus_floors(scores: Tensor, temperatures: Tensor, floors: Tensor, totals: Tensor, top_p: Tensor) -> Tensor:
    """Return float32 [rows], the smallest quotient in each row's nucleus, see `nucleus_thresholds`.

    Args:
        scores: float32 [rows, vocab_size], finite where it is not -inf.
        temperatures: float32 [rows].
        floors: float32 [rows], below which quotients have no weight.
        totals: float64 [rows], the sum of the weights, relative to the largest one.
        top_p: float64 [rows].
    """
    found = torch.empty_like(floors)
    rows = torch.arange(len(scores))
    for width in WIDTHS:
        quotients = _largest(scores[rows], width) / temperatures[rows, None]
        weights = (quotients - quotients[:, :1]).double().exp() / totals[rows, None]
        weights.masked_fill_(quotients < floors[rows, None], 0)
        cumulative = weights.cumsum(dim=-1)
        inside = (cumulative - weights < top_p[rows, None]).sum(dim=-1, keepdim=True)
        smallest = quotients.gather(1, inside.clamp(min=1) - 1)[:, 0]
        found[rows] = torch.maximum(smallest, floors[rows])
        rows = rows[(cumulative[:, -1] < top_p[rows]) & (quotients[:, -1] >= floors[rows])]
        if not len(rows):
            return found
    quotients = scores[rows] / temperatures[rows, None]
    quotients.masked_fill_(quotients < floors[rows, None], -torch.inf)
    weights = quotients.softmax(dim=-1)
    outside = weights < nucleus_thresholds(weights, top_p[rows, None])
    found[rows] = quotients.masked_fill_(outside, torch.inf).amin(dim=-1)
    return found


def _largest(scores: Tensor, count: int) -> Tensor:
    """Return the largest values of each row in descending order, `count` or all of them."""
    rows, vocab_size = scores.shape
    count = min(count, vocab_size)
    num_blocks = -(-vocab_size // BLOCK)
    if 4 * count > num_blocks:
        return scores.topk(count).values
    padding = num_blocks * BLOCK - vocab_size
    blocks = (F.pad(scores, (0, padding), value=-torch.inf) if padding else scores).view(rows, num_blocks, BLOCK)
    best = blocks.amax(dim=-1).topk(count, sorted=False).indices
    return blocks.gather(1, best[:, :, None].expand(-1, -1, BLOCK)).flatten(1).topk(count).values
