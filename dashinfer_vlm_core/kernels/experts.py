"""A mixture of experts, composed of a kernel set's linear layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .types import Linear, Mlp


class MixtureOfExperts:
    """See `Experts`.

    The outputs of a row's experts are added in float32, in the order of the experts: the result does not depend on the
    other rows, if that of a linear layer does not.

    Args:
        router: the projection to one logit per expert, float32.
        experts: all experts.
        experts_per_token: number of experts that compute a row.
    """

    def __init__(self, router: Linear, experts: Sequence[Mlp], experts_per_token: int) -> None:
        self._router = router
        self._experts = experts
        self._per_token = experts_per_token

    def add_to(self, total: Tensor, x: Tensor) -> None:
        probabilities, experts = self._router(x).softmax(dim=-1).topk(self._per_token, dim=-1)
        weights = (probabilities / probabilities.sum(dim=-1, keepdim=True)).flatten()
        order = experts.flatten().argsort(stable=True)
        rows = order // self._per_token
        weights = weights[order, None]
        counts = experts.flatten().bincount(minlength=len(self._experts)).tolist()
        out = torch.zeros(x.shape[0], total.shape[1], dtype=torch.float32, device=x.device)
        start = 0
        for expert, count in zip(self._experts, counts, strict=True):
            if count:
                chosen = slice(start, start + count)
                computed = expert.down(expert.gate_up(x[rows[chosen]]))
                out.index_add_(0, rows[chosen], computed.float() * weights[chosen])
                start += count
        total += out


class GroupedExperts:
    """See `Experts`. All experts are computed by two grouped matrix products, and nothing is read from the device.

    Args:
        router: the projection to one logit per expert, float32.
        gate_up: [experts, 2 * inner size, hidden], the weights of gate and up projection.
        down: [experts, hidden, inner size], the weights of the projection back to the hidden size.
        experts_per_token: number of experts that compute a row.
    """

    def __init__(self, router: Linear, gate_up: Tensor, down: Tensor, experts_per_token: int) -> None:
        self._router = router
        self._gate_up = gate_up.transpose(1, 2)
        self._down = down.transpose(1, 2)
        self._per_token = experts_per_token

    def add_to(self, total: Tensor, x: Tensor) -> None:
        if not len(x):
            return
        probabilities, experts = self._router(x).softmax(dim=-1).topk(self._per_token, dim=-1)
        weights = probabilities / probabilities.sum(dim=-1, keepdim=True)
        chosen, order = experts.flatten().sort(stable=True)
        numbers = torch.arange(len(self._down), device=x.device)
        ends = torch.searchsorted(chosen, numbers, right=True, out_int32=True)
        gate, up = F.grouped_mm(x[order // self._per_token], self._gate_up, offs=ends).chunk(2, dim=-1)
        computed = F.grouped_mm(F.silu(gate) * up, self._down, offs=ends)
        outputs = torch.empty_like(computed)
        outputs[order] = computed
        total += (torch.unflatten(outputs, 0, experts.shape).float() * weights[..., None]).sum(dim=1)
