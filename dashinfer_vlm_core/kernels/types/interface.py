"""The interface of a kernel set."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..quantization import Quantization, QuantizedWeight
from .batch import ForwardBatch, KVCacheLayer
from .layers import DecoderLayer, DecoderShape
from .linear import Activation, Linear, LMHead, StepCost, WeightBits
from .recurrent import DeltaInputs, DeltaNet, RecurrentStates, StateSpans
from .spans import KVSpans


class DecoderLayers(Protocol):
    """All layers of a decoder."""

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the hidden states after the last layer, and write the new tokens' keys and values to the cache.

        Args:
            x: [tokens, hidden], contiguous; overwritten.
            batch: positions, cache slots and spans of the tokens.

        Returns:
            [len(batch.last), hidden]; the last layer computes only these rows.
        """


class Kernels(Protocol):
    """A kernel set. It is stateless and thread-safe.

    Attributes:
        name: the name shown in logs and reports.
        supports_int8: whether 8-bit weights are kept in 8 bits; otherwise they are rounded and kept in their dtype.
        supports_int4: the same for 4-bit weights.
        copies_weights: whether layers and heads copy their weights, which may then be views of a mapped file.
        weight_bits: what weights take in memory.
        step_cost: the time of a decode step, for estimates.
    """

    name: str
    supports_int8: bool
    supports_int4: bool
    copies_weights: bool
    weight_bits: WeightBits
    step_cost: StepCost

    def linear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        activation: Activation = Activation.NONE,
        fp32_output: bool = False,
        quantization: Quantization | None = None,
    ) -> Linear:
        """Create a linear layer from weights [outputs, inputs], which may be copied to another layout.

        Args:
            weight: on the model's device and in its dtype.
            bias: [outputs].
            activation: the activation to apply to the output.
            fp32_output: return float32.
            quantization: how to quantize the weights. If they are kept in 4 or 8 bits, the activations are quantized to
                8 bits dynamically.
        """

    def linear_quantized(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        activation: Activation = Activation.NONE,
        fp32_output: bool = False,
    ) -> Linear:
        """Create a linear layer from weights that are quantized already; see `linear`.

        Args:
            weight: on the model's device.
            bias: [outputs].
            dtype: the model's dtype, to which the weights are dequantized if they are not kept in their bits; see
                `linears.keeps_bits`.
            activation: the activation to apply to the output.
            fp32_output: return float32.

        Raises:
            ValueError: `weight` is inconsistent; see `QuantizedWeight.check`.
        """

    def head(self, weight: Tensor, *, quantization: Quantization | None = None) -> LMHead:
        """Create an LM head from weights [outputs, inputs]; see `linear`."""

    def groups_experts(self, dtype: torch.dtype, inputs: Sequence[int]) -> bool:
        """Whether experts whose linear layers have these inputs are computed at once, with torch's grouped products."""

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Apply LayerNorm or, without a bias, RMSNorm to x [rows, columns]."""

    def rotate_(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Apply rotary embedding to x [rows, heads, head_dim] in place.

        Rotates the pairs (i, i + head_dim / 2); cos and sin are float32 [rows, head_dim / 2].
        """

    def gate_(self, x: Tensor, gates: Tensor) -> None:
        """Multiply x [rows, columns], contiguous, by the sigmoid of `gates` [rows, columns] in place."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spans: KVSpans) -> Tensor:
        """Compute softmax attention, scaled by 1 / sqrt(head_dim); query heads that share keys are adjacent.

        Args:
            q: [rows, heads, head_dim].
            k: [kv_heads, key rows, head_dim].
            v: [kv_heads, key rows, head_dim], with the same strides as k.
            spans: cover all rows of q, in order.

        Returns:
            [rows, heads * head_dim].
        """

    def mix_delta_net(self, net: DeltaNet, inputs: DeltaInputs, states: RecurrentStates, spans: StateSpans) -> Tensor:
        """Compute a gated delta net between its input and output projections; see `delta_net.mix`.

        Args:
            net: the layer.
            inputs: the outputs of its input projections.
            states: the slots of the layer; those of `target` and `saved` are written.
            spans: the rows of `inputs` to compute.

        Returns:
            [tokens, value heads * value_dim], normalized and multiplied by the gate; rows outside the spans are
            undefined.
        """

    def decoder_layers(self, layers: Sequence[DecoderLayer], shape: DecoderShape) -> DecoderLayers:
        """Create decoder layers from `layers`, whose linear layers were created by these kernels."""


@runtime_checkable
class Int8CacheAttention(Protocol):
    """Kernels that also attend to an int8 KV cache directly; see `attend_cached`."""

    def attend_int8(self, q: Tensor, cache: KVCacheLayer, spans: KVSpans) -> Tensor:
        """Compute `Kernels.attend` with the keys and values of `cache`, which has scales."""


@runtime_checkable
class StorableLayers(Protocol):
    """Kernels whose layers can be stored in the form in which they are kept, and loaded again."""

    @property
    def layout(self) -> str:
        """Identifies that form: it can be loaded by kernels with the same value."""

    def stored_tensors(self, layer: Linear | LMHead) -> dict[str, Tensor] | None:
        """Return what `layer` consists of, without its bias; None if it cannot be stored."""

    def load_linear(
        self, tensors: Mapping[str, Tensor], bias: Tensor | None, *, activation: Activation, fp32_output: bool
    ) -> Linear:
        """Create a linear layer that was stored, without copying `tensors`."""

    def load_head(self, tensors: Mapping[str, Tensor]) -> LMHead:
        """Create an LM head that was stored, without copying `tensors`."""

    def adopt(self, memory: mmap.mmap, start: int) -> None:
        """Accept a private mapping of the file with stored tensors, whose pages from `start` on the kernels may replace
        by copies."""


class SampledIds(NamedTuple):
    """The tokens sampled from rows of logits.

    Attributes:
        ids: int64 [rows].
        totals: float64 [rows], the sum of the weights, relative to the largest one; not finite if the largest logit is
            not, or if any is NaN.
    """

    ids: Tensor
    totals: Tensor


@runtime_checkable
class TokenSampling(Protocol):
    """Kernels that also sample tokens from logits."""

    def sample_tokens(
        self,
        logits: Tensor,
        rows: Tensor,
        temperatures: Tensor,
        *,
        lower_bounds: Tensor,
        max_differences: Tensor,
        uniforms: Tensor,
    ) -> SampledIds:
        """Sample a token from some rows of logits: the first one at which the cumulative sum of the weights exceeds
        their total times a uniform number. A logit's weight is e^(logit / temperature), or 0 if that quotient is
        below the lower bound, or below the row's largest one by more than the maximum difference.

        Args:
            logits: float32 [.., vocab_size], with contiguous rows.
            rows: int64, the rows to sample from. All others have one element for each of them.
            temperatures: float32, positive.
            lower_bounds: float32.
            max_differences: float32, not negative.
            uniforms: float64, in [0, 1).
        """
