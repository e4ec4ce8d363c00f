"""LoRA adapters in the form in which the text model applies them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dashinfer_vlm_core.concurrency.compute import Executor
from dashinfer_vlm_core.kernels.types import Kernels, Linear, LMHead, LoraLayer, LoraLayers, LowRank, LowRankPart
from dashinfer_vlm_core.models.lora import LoraWeights
from dashinfer_vlm_core.models.lora_weights import Factors, read_factors, read_tensor
from dashinfer_vlm_core.text_spec import TextModelSpec

RANK_MULTIPLE = 4
"""Ranks are padded with zeros to a multiple of this, which the C kernels require of the inputs of a linear layer."""


class EmbeddingChange(NamedTuple):
    """What an adapter changes in the embedding table.

    Attributes:
        table: [vocab_size, hidden_size], replaces the table; None if it is not replaced.
        down: the transposed first factor, [vocab_size, rank]; None if nothing is added.
        up: the second factor, [hidden_size, rank].
    """

    table: Tensor | None
    down: Tensor | None
    up: Linear | None

    def apply(self, token_ids: Tensor, x: Tensor) -> None:
        """Change x [tokens, hidden_size], the embeddings of int64 [tokens], in place."""
        if self.table is not None:
            x.copy_(F.embedding(token_ids, self.table))
        if self.down is not None and self.up is not None:
            x += self.up(F.embedding(token_ids, self.down))


class HeadChange(NamedTuple):
    """What an adapter changes in the output layer.

    Attributes:
        head: replaces the output layer; None if it is not replaced.
        down: the first factor; None if nothing is added.
        up: the second factor.
    """

    head: LMHead | None
    down: Linear | None
    up: Linear | None

    def apply(self, x: Tensor, logits: Tensor) -> None:
        """Change float32 logits [rows, vocab_size] of the normalized hidden states x [rows, hidden_size], in place."""
        if self.head is not None:
            logits.copy_(self.head(x))
        if self.down is not None and self.up is not None:
            logits += self.up(self.down(x))


class TextLora(NamedTuple):
    """An adapter of the text model.

    Attributes:
        layers: what it adds to the layers; None if nothing.
        embedding: what it changes in the embedding table; None if nothing.
        head: what it changes in the output layer; None if nothing.
        num_bytes: size of its weights before they are packed.
    """

    layers: LoraLayers | None
    embedding: EmbeddingChange | None
    head: HeadChange | None
    num_bytes: int


class LoraReader:
    """Reads the text model's part of an adapter.

    Args:
        lora: the adapter.
        spec: the text model.
        kernels: the kernels that run the model.
        device: torch's name of the device.
        dtype: the model's dtype.
        qkv_scales: by layer, float32 [outputs], the factors by which the rows of the model's own projections were
            multiplied when they were loaded; missing if they were not.
        as_halves: permutes rows of queries and keys to the order of the model's; None if it is the checkpoint's.
    """

    def __init__(
        self,
        lora: LoraWeights,
        spec: TextModelSpec,
        kernels: Kernels,
        *,
        device: str,
        dtype: torch.dtype,
        qkv_scales: Mapping[int, Tensor],
        as_halves: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self._lora = lora
        self._spec = spec
        self._kernels = kernels
        self._device = device
        self._dtype = dtype
        self._qkv_scales = qkv_scales
        self._as_halves = as_halves
        self._num_bytes = 0

    def read(self, executor: Executor) -> TextLora:
        """Read the adapter on `executor`, where other tasks can run between its parts.

        Raises:
            CheckpointError: the adapter's file is damaged.
        """
        run, count = executor.run, self._spec.num_hidden_layers
        layers = [run(functools.partial(self._layer, number)) for number in range(count)]
        adapted = LoraLayers(layers) if any(any(layer) for layer in layers) else None
        return TextLora(adapted, run(self._embedding), run(self._head), self._num_bytes)

    def _layer(self, number: int) -> LoraLayer:
        names, spec = self._spec.weights, self._spec
        query, key = (heads * spec.head_dim for heads in (spec.num_attention_heads, spec.num_key_value_heads))
        inner = spec.intermediate_size
        prefix = names.layer.format(number)

        def read(modules: Sequence[str], outputs: Sequence[int]) -> LowRank | None:
            found = [self._lora.text.get(f"{prefix}.{name}") for name in modules]
            factors = [read_factors(self._lora, part) if part else None for part in found]
            if modules[0] == names.query:
                factors = self._as_loaded(number, factors)
            return self._low_rank(factors, outputs)

        return LoraLayer(
            qkv=read((names.query, names.key, names.value), (query, key, key)),
            output=read((names.output,), (spec.hidden_size,)),
            gate_up=read((names.gate, names.up), (inner, inner)),
            down=read((names.down,), (spec.hidden_size,)),
        )

    def _as_loaded(self, number: int, factors: Sequence[Factors | None]) -> list[Factors | None]:
        """Permute and scale the rows of the query, key and value projections like those of the model."""
        spec = self._spec
        query, key = (heads * spec.head_dim for heads in (spec.num_attention_heads, spec.num_key_value_heads))
        scales = self._qkv_scales.get(number, torch.ones(query + 2 * key))
        loaded: list[Factors | None] = []
        for index, (part, scale) in enumerate(zip(factors, torch.split(scales, [query, key, key]), strict=True)):
            if part is None:
                loaded.append(None)
                continue
            b = self._as_halves(part.b) if self._as_halves and index < 2 else part.b
            loaded.append(Factors(part.a, b * scale.cpu()[:, None]))
        return loaded

    def _low_rank(self, factors: Sequence[Factors | None], outputs: Sequence[int]) -> LowRank | None:
        """Fuse the first factors of projections of the same input."""
        downs: list[Tensor] = []
        parts: list[LowRankPart] = []
        first_input = first_output = 0
        for part, count in zip(factors, outputs, strict=True):
            if part is not None:
                a, b = _padded(part)
                downs.append(a)
                up = self._linear(b, fp32_output=True)
                parts.append(LowRankPart(up, first_input, len(a), first_output, count))
                first_input += len(a)
            first_output += count
        return LowRank(self._linear(torch.cat(downs)), tuple(parts), first_output) if parts else None

    def _linear(self, weight: Tensor, *, fp32_output: bool = False) -> Linear:
        weight = weight.to(self._device, self._dtype).contiguous()
        self._num_bytes += weight.numel() * weight.itemsize
        return self._kernels.linear(weight, fp32_output=fp32_output)

    def _embedding(self) -> EmbeddingChange | None:
        name = self._spec.weights.embedding
        table, factors = self._saved(name), self._factors(name)
        if factors is None:
            return None if table is None else EmbeddingChange(table, None, None)
        a, b = _padded(factors)
        down = a.T.contiguous().to(self._device, self._dtype)
        self._num_bytes += down.numel() * down.itemsize
        return EmbeddingChange(table, down, self._linear(b, fp32_output=True))

    def _head(self) -> HeadChange | None:
        name = self._spec.weights.head
        weight, factors = self._saved(name), self._factors(name)
        head = None if weight is None else self._kernels.head(weight)
        if factors is None:
            return None if head is None else HeadChange(head, None, None)
        a, b = _padded(factors)
        return HeadChange(head, self._linear(a), self._linear(b, fp32_output=True))

    def _saved(self, name: str) -> Tensor | None:
        stored = self._lora.saved.get(f"{name}.weight")
        if stored is None:
            return None
        tensor = read_tensor(self._lora, stored).to(self._device, self._dtype)
        self._num_bytes += tensor.numel() * tensor.itemsize
        return tensor

    def _factors(self, name: str) -> Factors | None:
        found = self._lora.text.get(name)
        return read_factors(self._lora, found) if found else None


def _padded(factors: Factors) -> Factors:
    """Pad the rank with zeros to a multiple of `RANK_MULTIPLE`."""
    missing = -len(factors.a) % RANK_MULTIPLE
    return Factors(F.pad(factors.a, (0, 0, 0, missing)), F.pad(factors.b, (0, missing)))
