"""Kernels in PyTorch, for any device and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from . import delta_net
from .layers import FullLMHead, ReferenceDecoderLayers
from .progressive import quantize_progressive
from .quantization import Quantization, QuantizedWeight, quantize_int8
from .types import (
    Activation,
    DecoderLayer,
    DecoderLayers,
    DecoderShape,
    DeltaInputs,
    DeltaNet,
    KVSpan,
    KVSpans,
    Linear,
    LMHead,
    RecurrentStates,
    StateSpans,
    StepCost,
    WeightBits,
)

TORCH_LAYER_SECONDS = 0.3e-3
"""What the operators of a layer take in a decode step, except for matrix products, see docs/lab/decode-steps.md."""

TORCH_DELTA_NET_SECONDS = 1e-3
"""What those of a gated delta net take in addition."""


class TorchKernels:
    """See `Kernels`. Weights with 4 or 8 bits are dequantized when a layer is created."""

    name = "torch"
    supports_int8 = False
    supports_int4 = False
    copies_weights = False
    weight_bits: WeightBits = WeightBits()
    step_cost: StepCost = StepCost(  # docs/lab/decode-steps.md
        slowdown=2, layer_seconds=TORCH_LAYER_SECONDS, delta_net_seconds=TORCH_DELTA_NET_SECONDS
    )

    def groups_experts(self, dtype: torch.dtype, inputs: Sequence[int]) -> bool:
        return False

    def __init__(self, device: str) -> None:
        kind = torch.device(device).type
        if kind == "cuda":
            # Where torch prefers cuDNN attention (2.11 does on Blackwell), it builds an execution plan for each new
            # shape, which takes nearly half a second, and every decode step has a new number of keys. The switch is
            # global to the process: a context manager around each call would race between the vision encoder's thread
            # and the decoder's.
            torch.backends.cuda.enable_cudnn_sdp(False)

    def linear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        activation: Activation = Activation.NONE,
        fp32_output: bool = False,
        quantization: Quantization | None = None,
    ) -> Linear:
        if quantization and quantization.bits == 4:
            weight = quantize_progressive(weight).dequantize(weight.dtype)
        elif quantization:
            weight = quantize_int8(weight)
        return self._linear(weight, bias, activation, fp32_output)

    def _linear(self, weight: Tensor, bias: Tensor | None, activation: Activation, fp32_output: bool) -> Linear:
        return TorchLinear(weight, bias, activation, fp32_output)

    def linear_quantized(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        activation: Activation = Activation.NONE,
        fp32_output: bool = False,
    ) -> Linear:
        weight.check()
        return self.linear(weight.dequantize(dtype), bias, activation=activation, fp32_output=fp32_output)

    def head(self, weight: Tensor, *, quantization: Quantization | None = None) -> LMHead:
        return FullLMHead(self.linear(weight, fp32_output=True, quantization=quantization))

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        if bias is None:
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def rotate_(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        first, second = x.float().chunk(2, dim=-1)
        cos = cos[:, None]
        sin = sin[:, None]
        rotated = torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)
        x.copy_(torch.cat(rotated, dim=-1))

    def gate_(self, x: Tensor, gates: Tensor) -> None:
        x.mul_(delta_net.sigmoid(gates))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spans: KVSpans) -> Tensor:
        if all(span.start < 0 for span in spans.spans):
            return _attend_unmasked(q, k, v, spans.spans)
        return torch.cat([
            _attend(q[span.first_query : span.first_query + span.num_queries], k[:, rows], v[:, rows], mask)
            for span, mask in zip(spans.spans, spans.masks, strict=True)
            for rows in [slice(span.first_key, span.first_key + span.num_keys)]
        ])  # fmt: skip

    def mix_delta_net(self, net: DeltaNet, inputs: DeltaInputs, states: RecurrentStates, spans: StateSpans) -> Tensor:
        return delta_net.mix(net, inputs, states, spans)

    def decoder_layers(self, layers: Sequence[DecoderLayer], shape: DecoderShape) -> DecoderLayers:
        return ReferenceDecoderLayers(self, layers, shape)


class TorchLinear:
    """A linear layer with the weights in their original layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: Activation, fp32_output: bool) -> None:
        self._weight = weight
        self._bias = bias
        self._activation = activation
        self._fp32_output = fp32_output

    def __call__(self, x: Tensor, row_bias: Tensor | None = None) -> Tensor:
        out = _activate(self._biased_product(x, row_bias), self._activation)
        return out.float() if self._fp32_output else out

    def add_to(self, total: Tensor, x: Tensor, row_bias: Tensor | None = None) -> None:
        total += self._biased_product(x, row_bias)

    def _biased_product(self, x: Tensor, row_bias: Tensor | None) -> Tensor:
        product = self._product(x)
        if row_bias is not None:
            product[len(product) - len(row_bias) :] += row_bias
        return product

    def _product(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


def _activate(x: Tensor, activation: Activation) -> Tensor:
    if activation is Activation.QUICK_GELU:
        return x * torch.sigmoid(1.702 * x)
    if activation is Activation.GELU:
        return F.gelu(x)
    if activation is Activation.GELU_TANH:
        return F.gelu(x, approximate="tanh")
    if activation is Activation.SILU_GATE:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
    return x


def _attend_unmasked(q: Tensor, k: Tensor, v: Tensor, spans: tuple[KVSpan, ...]) -> Tensor:
    attended = []
    for (tokens, _), group in groupby(spans, key=lambda span: (span.num_queries, span.num_keys)):
        members = list(group)
        rows = slice(members[0].first_query, members[-1].first_query + tokens)
        keys = slice(members[0].first_key, members[-1].first_key + members[-1].num_keys)
        batch = len(members)
        queries = torch.unflatten(q[rows], 0, (batch, -1)).transpose(1, 2)  # [spans, heads, tokens, head_dim]
        k_, v_ = (torch.unflatten(x[:, keys], 1, (batch, -1)).transpose(0, 1) for x in (k, v))
        mixed = F.scaled_dot_product_attention(queries, k_, v_)
        attended.append(mixed.transpose(1, 2).flatten(2).flatten(0, 1))
    return torch.cat(attended)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attend one span: q [tokens, heads, head_dim], k and v [kv_heads, length, head_dim], mask as in `KVSpans`."""
    tokens, heads, width = q.shape
    groups = len(k), heads // len(k)
    if tokens == 1:
        # Query heads that share keys become rows of one matrix product: up to ten times as fast as `enable_gqa` on a
        # CPU.
        return F.scaled_dot_product_attention(q.view(1, *groups, width), k[None], v[None]).reshape(1, heads * width)
    shared = (*groups, k.shape[1], width)
    mixed = F.scaled_dot_product_attention(
        q.view(tokens, *groups, width).permute(1, 2, 0, 3),
        k[:, None].expand(shared),
        v[:, None].expand(shared),
        attn_mask=mask,
        is_causal=mask is None,
    )
    return mixed.permute(2, 0, 1, 3).reshape(tokens, heads * width)
