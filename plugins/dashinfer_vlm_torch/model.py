"""The text model: from packed tokens of many sequences to the logits of the requested rows.

Its layers are built from a `TextModelSpec`; transformers' models are the reference. Weights that multiply the same
input are fused into one matrix.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dashinfer_vlm_core.concurrency.compute import Executor
from dashinfer_vlm_core.errors import CheckpointError
from dashinfer_vlm_core.kernels import delta_net
from dashinfer_vlm_core.kernels.experts import MixtureOfExperts
from dashinfer_vlm_core.kernels.quantization import INT8, Quantization, has_8_bits
from dashinfer_vlm_core.kernels.streams import HIGH_PRIORITY, stream_executor
from dashinfer_vlm_core.kernels.types import (
    DecoderLayer,
    DecoderLayers,
    DeltaNet,
    ForwardBatch,
    Kernels,
    LowRank,
    RecurrentBatch,
)
from dashinfer_vlm_core.models.lora import LoraWeights
from dashinfer_vlm_core.models.pooling import PoolingSpec, Projection, keeps_outputs
from dashinfer_vlm_core.models.weight_cache import ConvertedWeights
from dashinfer_vlm_core.models.weights import Weights
from dashinfer_vlm_core.progress import Progress
from dashinfer_vlm_core.text_spec import RotarySpec, TextModelSpec

from .layer_segments import LayerSegments
from .lora import HeadChange, LoraReader, TextLora
from .mtp_head import MtpHead
from .text_model_reader import PoolingHead, TextModelReader, decoder_shape


def layer_quantization(quantization: Quantization | None, number: int, count: int) -> Quantization | None:
    """Return how the matrices of layer `number` of `count` layers are quantized if those of most layers are quantized
    by `quantization`."""
    return INT8 if quantization and has_8_bits(number, count) else quantization


class TextModel:
    """Embedding table, layers, final norm and output layer on one device, in one dtype.

    Attributes:
        mtp: the checkpoint's head for multi-token prediction; None without one.
    """

    def __init__(
        self,
        weights: Weights,
        config: TextModelSpec,
        kernels: Kernels,
        *,
        device: str,
        dtype: torch.dtype,
        quantization: Quantization | None,
        cache_dtype: torch.dtype | None = None,
        pooling: PoolingSpec | None = None,
        captured_layers: Sequence[int] = (),
        converted: ConvertedWeights | None = None,
    ) -> None:
        """Load the model.

        Args:
            weights: the checkpoint's tensors.
            config: the architecture.
            kernels: the kernels that run the model.
            device: torch's name of the device.
            dtype: the dtype of weights and hidden states.
            quantization: how the matrices of most layers are quantized, which `kernels` must support; some keep 8 bits,
                see `has_8_bits`, or the dtype, see `keeps_outputs`. None keeps the dtype.
            cache_dtype: the dtype of the KV cache; that of the hidden states by default.
            pooling: how hidden states are pooled, instead of computing logits; None to generate text.
            captured_layers: the numbers of layers after which `forward_and_capture` returns hidden states.
            converted: the layers that an earlier start converted; by default, none.
        """
        self.config = config
        self.device = device
        self.dtype = dtype
        self.kernels = kernels
        self.executor: Executor = stream_executor(device, priority=HIGH_PRIORITY)
        run = self.executor.run
        self._qkv_scales: dict[int, Tensor] = {}
        converted = converted or ConvertedWeights()
        balances_keys = cache_dtype == torch.int8
        read = TextModelReader(weights, config, kernels, device, dtype, converted, balances_keys, self._qkv_scales)
        names = config.weights
        count = len(config.layers)
        readers = [
            read._replace(
                quantization=layer_quantization(quantization, number, count),
                keeps_outputs=quantization == INT8 and keeps_outputs(pooling),
            )
            for number in range(count)
        ]
        # One task per part, so that other tasks can run in between.
        self._embedding = run(read.embedding)
        with Progress(readers, desc="Loading layers of the text model", unit="") as progress:
            layers = [run(functools.partial(reader.layer, number)) for number, reader in enumerate(progress)]
        self._layers = _combine(kernels, layers, config, captured_layers)
        self._delta_nets = [layer.mixer for layer in layers if isinstance(layer.mixer, DeltaNet)]
        self.loops_over_experts: bool = any(isinstance(layer.mlp, MixtureOfExperts) for layer in layers)
        self._norm = read.norm(names.norm, config.hidden_size)
        head = read._replace(quantization=INT8 if quantization else None)
        self.pools: bool = pooling is not None
        self._projection = pooling.head if pooling and isinstance(pooling.head, Projection) else None
        self._head = None if pooling else run(lambda: head.head(self._embedding))
        self._pooling_head: PoolingHead | None = (
            head.pooling_head(pooling.head, self._embedding) if pooling and pooling.head else None
        )
        # Its layer is quantized like the last one.
        self.mtp: MtpHead | None = run(lambda: self._read_mtp(readers[-1])) if config.mtp_layer else None
        self.rotary: Rotary = Rotary(config.attention.rotary, config.attention.head_dim, device)

    def _read_mtp(self, reader: TextModelReader) -> MtpHead | None:
        # A copy has the same weights, but its own count of the steps in which `argmax` is not attempted.
        return None if self._head is None else reader.mtp_head(copy.copy(self._head))

    def embed(self, token_ids: Tensor) -> Tensor:
        """Look up int64 [tokens]; returns a new, writable tensor [tokens, hidden_size]."""
        return F.embedding(token_ids, self._embedding)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Compute hidden states after the last layer and the final norm; see `DecoderLayers`."""
        return self._normalize(self._layers(x, batch))

    def forward_and_capture(self, x: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return also the hidden states after the captured layers of all tokens, concatenated."""
        assert isinstance(self._layers, LayerSegments)
        last, captured = self._layers.run(x, batch)
        return self._normalize(last), captured

    def rewind(self, batch: RecurrentBatch, counts: Mapping[int, int]) -> None:
        """Compute states again after a forward pass, see `delta_net.rewind`."""
        delta_net.rewind(self.kernels, self._delta_nets, batch, counts)

    def logits(self, x: Tensor, heads: Sequence[tuple[slice, HeadChange]] = ()) -> Tensor:
        """Compute float32 [rows, vocab_size] from [rows, hidden_size], as `forward` returns them; `heads` are the rows
        for which an adapter changes the output layer."""
        assert self._head is not None
        logits = self._head(x)
        for rows, head in heads:
            head.apply(x[rows], logits[rows])
        return logits

    def argmax(self, x: Tensor) -> Tensor | None:
        """Return int64 [rows], the token of each row's largest logit; None if the caller has to use `logits`."""
        assert self._head is not None
        return self._head.argmax(x)

    def pool(self, x: Tensor, changes: Sequence[tuple[slice, LowRank]] = ()) -> Tensor:
        """Compute float32 [rows, hidden_size], scores [rows, 1] or projected rows, from hidden states [rows,
        hidden_size]; `changes` are the rows for which an adapter changes the projection."""
        head = self._pooling_head
        if head is None:
            return x.float()
        pooled = F.linear(x.float(), head.weight, head.bias)
        for rows, change in changes:
            (part,) = change.parts
            pooled[rows] += part.up(change.down(x[rows]))
        return pooled

    def load_lora(self, lora: LoraWeights) -> TextLora:
        """Read the text model's part of an adapter.

        Raises:
            CheckpointError: the adapter's file is damaged, or it changes the output layer of a pooling model.
        """
        reader = LoraReader(
            lora, self.config, self.kernels, self.device, self.dtype, self._qkv_scales, self._projection
        )
        read = reader.read(self.executor)
        if self.pools and read.head:
            raise CheckpointError(
                f"The LoRA adapter {lora.name!r} changes the output layer, which embeddings and scores do not use."
                " Merge it into the checkpoint."
            )
        return read

    def _normalize(self, x: Tensor) -> Tensor:
        if not len(x):
            return x
        return self.kernels.norm(x, self._norm.weight, self._norm.bias, self.config.norm_eps)


def _combine(
    kernels: Kernels, layers: Sequence[DecoderLayer], config: TextModelSpec, captured: Sequence[int]
) -> DecoderLayers:
    shape = decoder_shape(config)
    return LayerSegments(kernels, layers, shape, captured) if captured else kernels.decoder_layers(layers, shape)


class Rotary:
    """M-RoPE (arXiv 2409.12191, section 2.1): each frequency is rotated by the time, height or width
    position."""

    def __init__(self, rotary: RotarySpec, head_dim: int, device: str) -> None:
        exponents = torch.arange(0, rotary.columns, 2, dtype=torch.float32) / rotary.columns
        others = (0, (head_dim - rotary.columns) // 2)
        self._frequencies = F.pad(1.0 / rotary.theta**exponents, others).to(device)
        self._axes = F.pad(torch.tensor(rotary.axes), others).to(device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the cosines and sines, float32 [tokens, head_dim / 2], of int64 positions [3, tokens]."""
        angles = positions[self._axes].T.contiguous() * self._frequencies
        return angles.cos(), angles.sin()
