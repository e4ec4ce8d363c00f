"""The C kernels, called through ctypes.

A row's result is bit-exact regardless of the other rows in the batch, unless it falls back to PyTorch.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dashinfer_vlm_core.kernels.choice import LoadedKernels
from dashinfer_vlm_core.kernels.delta_net import CHUNK
from dashinfer_vlm_core.kernels.devices import cpu_flags
from dashinfer_vlm_core.kernels.kv_cache import attend_cached
from dashinfer_vlm_core.kernels.quantization import Quantization, QuantizedWeight
from dashinfer_vlm_core.kernels.torch_kernels import TorchKernels
from dashinfer_vlm_core.kernels.types import (
    Activation,
    DecoderLayer,
    DecoderLayers,
    DecoderShape,
    DeltaInputs,
    DeltaNet,
    KVCacheLayer,
    KVSpans,
    Linear,
    LMHead,
    RecurrentStates,
    SampledIds,
    StateSpans,
    StepCost,
    WeightBits,
)

from . import huge_pages, stored_layers
from .build import AMX, LIBRARY, Variant
from .library import COMPILE, LibraryError, load_library
from .native_delta_net import mix_delta_net
from .native_layer_table import supports_layers
from .native_layers import NativeLayers
from .native_linear import C_TYPES, NativeLinear, NativeLMHead, fields
from .package_digest import package_digest

MAX_HEADS_PER_KV_HEAD = 192
"""Maximum number of query heads per key head: their queries of one token are processed together."""

SIGNATURES = {
    "pack_bf16": "plliplli",
    "pack_codes": "pllippplli->i",
    "pack_int8": "pllipplli",
    "pack_int8_codes": "ppllipplli",
    "pack_progressive": "pllipplli",
    "pack_int4": "pppplllipplli",
    "linear_biased": "ppllpliplpi",
    "norm": "plppfplli",
    "rotate": "plppllli",
    "multiply_gates": "ppllli",
    "attend": "pplpi",
    "mix_delta_net": "pplppi",
    "run_layers": "plppi",
    "compute_argmax_bounds": "pllpppi",
    "argmax_columns": "ppllppi",
    "sample_tokens": "plpllppppppi",
    "largest_tokens": "plllpi->i",
    "codes_size": "l->l",
    "int4_size": "lll->l",
    "progressive_size": "ll->l",
    "linear_workspace_size": "pli->l",
    "argmax_workspace_size": "lll->l",
    "attend_workspace_size": "l->l",
    "delta_chunk_size": "->l",
    "delta_workspace_size": "ll->l",
}
"""The arguments of each C function, and its result if it has one, in the letters of `C_TYPES`."""


class AttentionArgs(ctypes.Structure):
    """`AttentionArgs` in C."""

    _fields_ = fields(
        "p q k v out, l q_token q_head kv_token kv_head out_token heads kv_heads width, f scale,"
        " p k_scales v_scales, l scale_head"
    )


class NativeKernels(TorchKernels):
    """See `Kernels`. For bfloat16 on a CPU; the number of inputs is even."""

    supports_int8 = True
    supports_int4 = True
    copies_weights = True
    weight_bits: WeightBits = WeightBits(layer=12, head=20, tied_head=20, argmax=8)
    step_cost: StepCost = StepCost(slowdown=1, layer_seconds=0.12e-3, delta_net_seconds=0.15e-3)  # on two cores

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        super().__init__("cpu")
        self._library = library
        self.name = name

    @property
    def layout(self) -> str:
        """See `StorableLayers`."""
        return f"{self.name} {package_digest()}"

    def stored_tensors(self, layer: Linear | LMHead) -> dict[str, Tensor] | None:
        return stored_layers.stored_tensors(layer)

    def load_linear(
        self, tensors: Mapping[str, Tensor], bias: Tensor | None, *, activation: Activation, fp32_output: bool
    ) -> Linear:
        return stored_layers.load_linear(self._library, tensors, bias, activation=activation, fp32_output=fp32_output)

    def load_head(self, tensors: Mapping[str, Tensor]) -> LMHead:
        return stored_layers.load_head(self._library, tensors)

    def adopt(self, memory: mmap.mmap, start: int) -> None:
        huge_pages.adopt(memory, start)

    def linear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        activation: Activation = Activation.NONE,
        fp32_output: bool = False,
        quantization: Quantization | None = None,
    ) -> Linear:
        weight = weight.contiguous()
        if weight.shape[1] % 4:  # weights are packed in groups of four inputs
            return super().linear(
                weight.clone(), bias, activation=activation, fp32_output=fp32_output, quantization=quantization
            )
        bits = quantization.bits if quantization else 16
        return NativeLinear(self._library, weight, bias, activation, fp32_output, bits=bits)

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
        if weight.bits == 4 or (weight.is_symmetric_int8 and weight.codes.shape[1] % 4 == 0):
            return NativeLinear(self._library, weight, bias, activation, fp32_output)
        return self.linear(weight.dequantize(torch.bfloat16), bias, activation=activation, fp32_output=fp32_output)

    def head(self, weight: Tensor, *, quantization: Quantization | None = None) -> LMHead:
        if quantization or weight.shape[1] % 4:
            return super().head(weight, quantization=quantization)
        return NativeLMHead(self._library, weight.contiguous())

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        rows, columns = x.shape
        assert x.stride(1) == 1
        out = torch.empty(rows, columns, dtype=x.dtype)
        shift = None if bias is None else bias.data_ptr()
        threads = torch.get_num_threads()
        self._library.norm(
            x.data_ptr(), x.stride(0), weight.data_ptr(), shift, eps, out.data_ptr(), rows, columns, threads
        )
        return out

    def rotate_(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        rows, heads, width = x.shape
        assert x.stride()[1:] == (width, 1)
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        self._library.rotate(
            x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), rows, heads, width // 2, torch.get_num_threads()
        )

    def gate_(self, x: Tensor, gates: Tensor) -> None:
        assert x.is_contiguous()
        assert gates.stride(1) == 1
        self._library.multiply_gates(x.data_ptr(), gates.data_ptr(), gates.stride(0), *x.shape, torch.get_num_threads())

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spans: KVSpans) -> Tensor:
        if not _supports_attention(q.shape[1], len(k), q.shape[2]):
            return super().attend(q, k, v, spans)
        return self._attend(q, k, v, spans)

    def attend_int8(self, q: Tensor, cache: KVCacheLayer, spans: KVSpans) -> Tensor:
        """See `Int8CacheAttention`."""
        assert cache.scales is not None
        keys, values = cache.rows.chunk(2)
        if not _supports_attention(q.shape[1], len(keys), q.shape[2]):
            return attend_cached(TorchKernels("cpu"), q, cache, spans)
        return self._attend(q, keys, values, spans, cache.scales)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, spans: KVSpans, scales: Tensor | None = None) -> Tensor:
        rows, heads, width = q.shape
        assert k.stride() == v.stride()
        assert q.stride(2) == k.stride(2) == 1
        out = torch.empty(rows, heads * width, dtype=q.dtype)
        threads = torch.get_num_threads()
        workspace = torch.empty(threads * self._library.attend_workspace_size(width), dtype=torch.uint8)
        k_scales = v_scales = None
        scale_head = 0
        if scales is not None:
            assert scales.stride(1) == 1
            k_scales = scales.data_ptr()
            v_scales = scales[len(k) :].data_ptr()
            scale_head = scales.stride(0)
        description = AttentionArgs(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), q.stride(0), q.stride(1), k.stride(1),
            k.stride(0), heads * width, heads, len(k), width, width**-0.5, k_scales, v_scales, scale_head,
        )  # fmt: skip
        table = spans.table
        self._library.attend(ctypes.byref(description), table.data_ptr(), len(table), workspace.data_ptr(), threads)
        return out

    def mix_delta_net(self, net: DeltaNet, inputs: DeltaInputs, states: RecurrentStates, spans: StateSpans) -> Tensor:
        return mix_delta_net(self._library, net, inputs, states, spans)

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
        """See `TokenSampling`."""
        assert logits.dtype == temperatures.dtype == lower_bounds.dtype == max_differences.dtype == torch.float32
        assert uniforms.dtype == torch.float64
        assert logits.stride(1) == 1
        sampled = SampledIds(torch.empty(len(rows), dtype=torch.int64), torch.empty(len(rows), dtype=torch.float64))
        self._library.sample_tokens(
            logits.data_ptr(), logits.stride(0), rows.data_ptr(), len(rows), logits.shape[1], temperatures.data_ptr(),
            lower_bounds.data_ptr(), max_differences.data_ptr(), uniforms.data_ptr(), sampled.ids.data_ptr(),
            sampled.totals.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return sampled

    def decoder_layers(self, layers: Sequence[DecoderLayer], shape: DecoderShape) -> DecoderLayers:
        if supports_layers(layers) and _supports_attention(shape.heads, shape.kv_heads, shape.head_dim):
            return NativeLayers(self._library, layers, shape)
        return super().decoder_layers(layers, shape)


def _supports_attention(heads: int, kv_heads: int, width: int) -> bool:
    return width % 2 == 0 and heads <= MAX_HEADS_PER_KV_HEAD * kv_heads


@functools.cache
def load_variant(variant: Variant, path: Path = LIBRARY) -> LoadedKernels:
    """Load one variant of the C kernels, or report why it cannot be used."""
    missing = [name for name in variant.features if name not in cpu_flags()]
    if missing:
        return LoadedKernels(None, f"this CPU has no {' and no '.join(missing)}")
    try:
        library = load_library(variant, path)
    except LibraryError as error:
        return LoadedKernels(None, error.reason, error.fix)
    if variant is AMX and not library.tiles_permitted():
        return LoadedKernels(None, "the system does not permit this process to use AMX", "use Linux 5.16 or newer")
    for name, signature in SIGNATURES.items():
        arguments, _, result = signature.partition("->")
        getattr(library, name).argtypes = [C_TYPES[letter] for letter in arguments]
        getattr(library, name).restype = C_TYPES.get(result)
    if library.delta_chunk_size() < CHUNK:
        reason = f"they compute chunks of {library.delta_chunk_size()} tokens of delta nets, not {CHUNK}"
        return LoadedKernels(None, reason, f"set `DELTA_CHUNK` in delta_inputs.h, and {COMPILE}")
    return LoadedKernels(NativeKernels(library, variant.name))
