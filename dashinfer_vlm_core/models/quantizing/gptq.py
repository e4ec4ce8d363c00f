"""Round weights to 4 bits one input at a time, and compensate each error with the inputs that are not rounded yet.

Source: GPTQ (arXiv:2210.17323, section 3), with inputs in the order of their size, and scales that are fitted before
(`static_groups` in its code): the groups stay those of neighboring inputs, which all kernels and formats support.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.quantization import MAX_CODE, QuantizedWeight, quantize

DAMPING = 0.01
"""Part of the mean of the diagonal that is added to it, as in GPTQ's code."""

ATTEMPTS = 3
"""Each one has ten times the damping of the one before."""

BLOCK = 128
"""Number of inputs after which the errors are added to all later inputs at once."""


class Compensator:
    """Rounds the matrices of layers that have the same inputs.

    Args:
        products: float32 [inputs, inputs], the sum of the outer products of the calibration inputs.
    """

    def __init__(self, products: Tensor) -> None:
        self._order = products.diagonal().argsort(descending=True)
        self._factor = _factor(products[self._order][:, self._order])

    def quantize(self, weight: Tensor, group: int) -> QuantizedWeight:
        """Round weights [outputs, inputs] with groups of `group` inputs; see `kernels.quantization.quantize`."""
        fitted = quantize(weight, group)
        columns = self._order // group
        scales = fitted.scales.T[columns]
        zeros = fitted.zeros.T[columns].float()
        rows = weight.float().T[self._order]  # [inputs, outputs]: an input is contiguous
        inverses = torch.where(scales > 0, 1 / scales, 0)
        codes = torch.empty_like(rows)
        for start in range(0, len(rows), BLOCK):
            stop = min(start + BLOCK, len(rows))
            errors = torch.empty_like(rows[start:stop])
            for i in range(start, stop):
                codes[i] = ((rows[i] * inverses[i]).round_() + zeros[i]).clamp_(0, MAX_CODE)
                errors[i - start] = (rows[i] - (codes[i] - zeros[i]) * scales[i]) / self._factor[i, i]
                rows[i + 1 : stop] -= torch.outer(self._factor[i, i + 1 : stop], errors[i - start])
            rows[stop:] -= self._factor[start:stop, stop:].T @ errors
        natural = codes[self._order.argsort()].T
        return fitted._replace(codes=natural.to(torch.uint8).contiguous())


def _factor(products: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse, with more damping if there were too few calibration inputs."""
    diagonal = products.diagonal()
    damping = DAMPING * (float(diagonal.mean()) or 1.0)
    for _ in range(ATTEMPTS):
        damped = products + damping * torch.eye(len(products))
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            factor: Tensor
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return factor
        damping *= 10
    return torch.eye(len(products))  # without compensation
