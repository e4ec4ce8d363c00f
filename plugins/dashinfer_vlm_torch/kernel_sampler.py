"""Sample tokens with kernels: they read each row of logits three times, instead of storing the weights of all tokens
in several passes.

`top_k` becomes a lower bound for each row, which is found among its largest logits, and `min_p` the maximum difference
from the largest one: smaller ones have no weight. Rows with `top_p` are left to PyTorch's operators: if many tokens are
about equally likely, finding a nucleus takes several passes, and the kernels would add some.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dashinfer_vlm_core.kernels.types import Kernels, SampledIds, TokenSampling

from .sampler import RowSampler, uniform
from .sequence import LogitsRow

BLOCK = 128
"""Logits per block. The largest logits are in the blocks with the largest maxima, which are far fewer."""


def create_sampler(kernels: Kernels) -> RowSampler | None:
    """Return what samples tokens with kernels; None if they do not."""
    return functools.partial(sample_with_kernels, kernels) if isinstance(kernels, TokenSampling) else None


def sample_with_kernels(
    kernels: TokenSampling, scores: Tensor, numbers: Sequence[int], rows: Sequence[LogitsRow]
) -> SampledIds:
    """Sample tokens with kernels; see `sampler.RowSampler`. For logits on a CPU."""
    index = torch.tensor(numbers, dtype=torch.int64)
    temperatures = torch.tensor([row.sampling.temperature for row in rows])
    uniforms = torch.tensor([uniform(row) for row in rows], dtype=torch.float64)
    lower_bounds = torch.full((len(rows),), -torch.inf)
    _apply_top_k(lower_bounds, scores, index, temperatures, [row.sampling.top_k for row in rows])
    max_differences = torch.tensor([-math.log(p) if (p := row.sampling.min_p) else math.inf for row in rows])
    return kernels.sample_tokens(
        scores, index, temperatures, lower_bounds=lower_bounds, max_differences=max_differences, uniforms=uniforms
    )


def _apply_top_k(
    lower_bounds: Tensor, scores: Tensor, index: Tensor, temperatures: Tensor, top_k: Sequence[int]
) -> None:
    """Set the lower bounds of rows with `top_k` to their k-th largest quotient. Quotients equal to it are all kept."""
    limited = [number for number, k in enumerate(top_k) if 0 < k < scores.shape[-1]]
    if limited:
        largest = _largest(scores[index[limited]], max(top_k[number] for number in limited))
        ranks = torch.tensor([top_k[number] - 1 for number in limited])
        lower_bounds[limited] = largest.gather(1, ranks[:, None])[:, 0] / temperatures[limited]


def _largest(scores: Tensor, count: int) -> Tensor:
    rows, vocab_size = scores.shape
    num_blocks = -(-vocab_size // BLOCK)
    if 4 * count > num_blocks:
        return scores.topk(count).values
    padding = num_blocks * BLOCK - vocab_size
    blocks = (F.pad(scores, (0, padding), value=-torch.inf) if padding else scores).view(rows, num_blocks, BLOCK)
    best = blocks.amax(dim=-1).topk(count, sorted=False).indices
    return blocks.gather(1, best[:, :, None].expand(-1, -1, BLOCK)).flatten(1).topk(count).values
