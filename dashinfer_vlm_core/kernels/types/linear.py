"""The layers that a kernel set creates from weights, and the parameters of norms."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor


class Activation(IntEnum):
    """The activation that a linear layer applies to its output."""

    NONE = 0
    QUICK_GELU = 1
    """x * sigmoid(1.702 x) (arXiv:1606.08415, section 2)."""
    SILU_GATE = 2
    """silu(gate) * up (arXiv:2002.05202); weights and bias are the gate's rows, followed by as many of `up`."""
    GELU = 3
    GELU_TANH = 4
    """The approximation of GELU with tanh (arXiv:1606.08415, section 2)."""


class Linear(Protocol):
    """A linear layer with its weights in the kernels' layout."""

    def __call__(self, x: Tensor, row_bias: Tensor | None = None) -> Tensor:
        """Return [rows, outputs] for x [rows, inputs]; the last dimension of x is contiguous.

        `row_bias` is float32 [count, outputs of the weights], contiguous. It is added to the products of the last
        `count` rows before the activation.
        """

    def add_to(self, total: Tensor, x: Tensor, row_bias: Tensor | None = None) -> None:
        """Add the result for x [rows, inputs] to `total` [rows, outputs], in place; `row_bias` as above.

        `total` has the dtype of x; the layer has no activation and no `fp32_output`.
        """


@runtime_checkable
class LMHead(Protocol):
    """The output layer: a linear layer with float32 logits, of which often only the argmax is needed."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return float32 [rows, outputs] for x [rows, inputs]; the last dimension of x is contiguous."""

    def argmax(self, x: Tensor) -> Tensor | None:
        """Return the index of each row's largest logit, int64 [rows]; the first one of equal logits.

        Returns None if the caller has to use all logits: if they are not finite, if the index cannot be determined
        without computing them, or if computing them is faster.
        """


class WeightBits(NamedTuple):
    """Bits of memory per weight of a 16-bit dtype that is not quantized; a dtype with more bits needs more.

    Attributes:
        layer: of linear layers.
        head: of an LM head with weights that nothing else uses.
        tied_head: of an LM head that shares the embedding table, in addition to the table.
        argmax: those of an LM head that are read to find the argmax.
    """

    layer: int = 16
    head: int = 16
    tied_head: int = 0
    argmax: int = 16


class StepCost(NamedTuple):
    """The time of a decode step of one sequence, relative to reading its weights at the bandwidth of the memory.

    Attributes:
        slowdown: time of matrix products, divided by that of reading their weights.
        layer_seconds: what each layer adds to them.
        delta_net_seconds: what each gated delta net adds to that.
    """

    slowdown: float
    layer_seconds: float
    delta_net_seconds: float


class Norm(NamedTuple):
    """The parameters of a LayerNorm or, without a bias, of an RMSNorm."""

    weight: Tensor
    bias: Tensor | None = None
