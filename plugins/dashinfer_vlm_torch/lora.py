"""LoRA adapters in the form in which the text model applies them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dashinfer_vlm_core.concurrency.compute import Executor
from dashinfer_vlm_core.kernels.types import Kernels, Linear, LMHead, LoraLayer, LoraLayers, LowRank, LowRankPart
from dashinfer_vlm_core.models.lora import LoraWeights
from dashinfer_vlm_core.models.lora_weights import Factors, read_factors, read_tensor
from dashinfer_vlm_core.models.pooling import Projection
from dashinfer_vlm_core.text_spec import AttentionSpec, MlpSpec, TextModelSpec

from .head_order import row_orders

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
        low_rank: what is added, one part; None if nothing is.
    """

    head: LMHead | None
    low_rank: LowRank | None

    def apply(self, x: Tensor, logits: Tensor) -> None:
        """Change float32 logits [rows, vocab_size] of the normalized hidden states x [rows, hidden_size], in place."""
        if self.head is not None:
            logits.copy_(self.head(x))
        if self.low_rank:
            (part,) = self.low_rank.parts
            logits += part.up(self.low_rank.down(x))


class TextLora(NamedTuple):
    """An adapter of the text model.

    Attributes:
        layers: what it adds to the layers; None if nothing.
        embedding: what it changes in the embedding table; None if nothing.
        head: what it changes in the output layer; None if nothing.
        projection: what it adds to the projection of hidden states, one part; None if nothing.
    """

    layers: LoraLayers | None
    embedding: EmbeddingChange | None
    head: HeadChange | None
    projection: LowRank | None


class LoraReader(NamedTuple):
    """Reads the text model's part of an adapter.

    Attributes:
        lora: the adapter.
        spec: the text model.
        kernels: the kernels that run the model.
        device: torch's name of the device.
        dtype: the model's dtype.
        qkv_scales: by layer, float32 [outputs], the factors by which the rows of the model's own projections were
            multiplied when they were loaded; missing if they were not.
        projection: the projection of hidden states; None if there is none.
    """

    lora: LoraWeights
    spec: TextModelSpec
    kernels: Kernels
    device: str
    dtype: torch.dtype
    qkv_scales: Mapping[int, Tensor]
    projection: Projection | None

    def read(self, executor: Executor) -> TextLora:
        """Read the adapter on `executor`, where other tasks can run between its parts.

        Raises:
            CheckpointError: the adapter's file is damaged.
        """
        run = executor.run
        layers = [run(functools.partial(self._layer, number)) for number in range(len(self.spec.layers))]
        adapted = LoraLayers(layers) if any(any(layer) for layer in layers) else None
        return TextLora(adapted, run(self._embedding), run(self._head), run(self._projection))

    def _layer(self, number: int) -> LoraLayer:
        spec = self.spec
        names = spec.weights
        prefix = names.layer.format(number)
        mixer, mlp = spec.layers[number].mixer, spec.layers[number].mlp
        gate, up, down = names.mlp if isinstance(mlp, MlpSpec) else names.shared_expert
        inner = mlp.intermediate_size if isinstance(mlp, MlpSpec) else mlp.shared_intermediate_size

        def read(*modules: str) -> list[Factors | None]:
            return [self._factors(f"{prefix}.{name}") for name in modules]

        layer = LoraLayer(
            gate_up=self._low_rank(read(gate, up), (inner, inner)),
            down=self._low_rank(read(down), (spec.hidden_size,)),
            shared_router=self._low_rank(read(names.shared_router), (1,)),
        )
        if isinstance(mixer, AttentionSpec):
            qkv = self._as_loaded(number, read(names.query, names.key, names.value))
            return layer._replace(
                qkv=self._low_rank(qkv, mixer.outputs), output=self._low_rank(read(names.output), (spec.hidden_size,))
            )
        heads = mixer.num_value_heads
        return layer._replace(
            qkv=self._low_rank(read(names.delta_qkv, names.delta_z), (mixer.conv_channels, mixer.value_width)),
            gates=self._low_rank(read(names.delta_beta, names.delta_step), (heads, heads)),
            output=self._low_rank(read(names.delta_output), (spec.hidden_size,)),
        )

    def _as_loaded(self, number: int, factors: Sequence[Factors | None]) -> list[Factors | None]:
        attention = self.spec.attention
        scales = self.qkv_scales.get(number, torch.ones(sum(attention.outputs))).cpu()
        return [
            None if part is None else Factors(part.a, part.b[order] * scale[:, None])
            for part, order, scale in zip(
                factors, row_orders(attention), torch.split(scales, list(attention.outputs)), strict=True
            )
        ]

    def _low_rank(self, factors: Sequence[Factors | None], outputs: Sequence[int]) -> LowRank | None:
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
        return self.kernels.linear(weight.to(self.device, self.dtype).contiguous(), fp32_output=fp32_output)

    def _embedding(self) -> EmbeddingChange | None:
        name = self.spec.weights.embedding
        table = self._saved(name)
        factors = self._factors(name)
        if factors is None:
            return None if table is None else EmbeddingChange(table, None, None)
        a, b = _padded(factors)
        down = a.T.contiguous().to(self.device, self.dtype)
        return EmbeddingChange(table, down, self._linear(b, fp32_output=True))

    def _head(self) -> HeadChange | None:
        name = self.spec.weights.head
        weight = self._saved(name)
        head = None if weight is None else self.kernels.head(weight)
        low_rank = self._low_rank([self._factors(name)], [self.spec.vocab_size])
        return HeadChange(head, low_rank) if head or low_rank else None

    def _projection(self) -> LowRank | None:
        projection = self.projection
        return self._low_rank([self._factors(projection.name)], [projection.size]) if projection else None

    def _saved(self, name: str) -> Tensor | None:
        stored = self.lora.saved.get(f"{name}.weight")
        return None if stored is None else read_tensor(self.lora, stored).to(self.device, self.dtype)

    def _factors(self, name: str) -> Factors | None:
        found = self.lora.text.get(name)
        return read_factors(self.lora, found) if found else None


def _padded(factors: Factors) -> Factors:
    missing = -len(factors.a) % RANK_MULTIPLE
    return Factors(F.pad(factors.a, (0, 0, 0, missing)), F.pad(factors.b, (0, missing)))
