"""Sample tokens with kernels that draw from logits: they read each row three times, instead of storing the weights of
all tokens in several passes.

`top_k` becomes a floor for each row, which is found among its largest logits: smaller ones have no weight. Rows with
`top_p` are left to PyTorch's operators: if many tokens are about equally likely, finding a nucleus takes several
passes, and drawing would add some.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dashinfer_vlm_core.kernels import DrawnTokens, TokenDrawing

from .sampler import LogitsRow, uniform

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
        return self._kernels.draw_tokens(scores, index, temperatures, floors, shares)


def _apply_top_k(floors: Tensor, scores: Tensor, index: Tensor, temperatures: Tensor, top_k: Sequence[int]) -> None:
    """Set the floors of rows with `top_k` to their k-th largest quotient. Quotients equal to it are all kept."""
    limited = [number for number, k in enumerate(top_k) if 0 < k < scores.shape[-1]]
    if limited:
        largest = _largest(scores[index[limited]], max(top_k[number] for number in limited))
        ranks = torch.tensor([top_k[number] - 1 for number in limited])
        floors[limited] = largest.gather(1, ranks[:, None])[:, 0] / temperatures[limited]


def _largest(scores: Tensor, count: int) -> Tensor:
    """Return the `count` largest values of each row in descending order."""
    rows, vocab_size = scores.shape
    num_blocks = -(-vocab_size // BLOCK)
    if 4 * count > num_blocks:
        return scores.topk(count).values
    padding = num_blocks * BLOCK - vocab_size
    blocks = (F.pad(scores, (0, padding), value=-torch.inf) if padding else scores).view(rows, num_blocks, BLOCK)
    best = blocks.amax(dim=-1).topk(count, sorted=False).indices
    return blocks.gather(1, best[:, :, None].expand(-1, -1, BLOCK)).flatten(1).topk(count).values
