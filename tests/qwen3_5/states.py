"""Run the text model with states and rows that a test assigns, without the decoder's scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dashinfer_vlm_core.kernels.quantization import Quantization
from dashinfer_vlm_core.kernels.torch_kernels import TorchKernels
from dashinfer_vlm_core.kernels.types import (
    ForwardBatch,
    Kernels,
    KVSpan,
    KVSpans,
    LoraRows,
    RecurrentBatch,
    RecurrentStates,
    StateSpan,
    StateSpans,
)
from dashinfer_vlm_core.models.lora import read_lora
from dashinfer_vlm_core.models.weights import Weights
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_torch.chunk_boundaries import ChunkBoundaries
from dashinfer_vlm_torch.kv_cache import KVCache
from dashinfer_vlm_torch.model import TextModel


class Step(NamedTuple):
    """Tokens of one sequence in a forward pass, and whether they are computed one by one; see `StateSpan`. States are
    saved in slots after so many tokens of the step."""

    sequence: int
    ids: Tensor
    num_drafts: int = 0
    is_decoding: bool = False
    saved: tuple[tuple[int, int], ...] = ()


class Sequences:
    """A text model, and the state of some sequences.

    Args:
        folder: a checkpoint.
        count: number of sequences.
        kernels: the kernels; PyTorch's by default.
        dtype: the model's dtype.
        cache_dtype: the dtype of keys and values; the model's by default.
        rows: rows of the KV cache per sequence, which also has two slots.
        quantization: how the matrices are quantized.
        lora: the folder of an adapter.
        response_boundaries: where chunks begin, in addition to multiples of `CHUNK`.
    """

    def __init__(
        self,
        folder: Path,
        count: int = 1,
        *,
        kernels: Kernels | None = None,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        rows: int = 600,
        quantization: Quantization | None = None,
        lora: Path | None = None,
        response_boundaries: Sequence[int] = (),
    ) -> None:
        spec = load_plugins().load_spec(folder)
        with Weights(folder, spec.tensor_renames, spec.quantization) as weights:
            self.model = TextModel(
                weights, spec.text, kernels or TorchKernels("cpu"), device="cpu", dtype=dtype,
                quantization=quantization, cache_dtype=cache_dtype,
            )  # fmt: skip
        self.lora = self.model.load_lora(read_lora("adapter", str(lora), spec)).layers if lora else None
        net = spec.text.delta_net
        assert net
        layers, slots = spec.text.num_delta_net_layers, 2 * count
        self.cache = KVCache(spec.text, count * rows, device="cpu", dtype=cache_dtype or dtype)
        self.states = RecurrentStates(
            torch.full((layers, slots, net.conv_width - 1, net.conv_channels), torch.nan, dtype=dtype),
            torch.full((layers, slots, net.num_value_heads, net.key_dim, net.value_dim), torch.nan),
        )
        self.rows = rows
        self.boundaries = ChunkBoundaries(response_boundaries)
        self.lengths = [0] * count
        self.sources = [2 * number for number in range(count)]
        self.batch: ForwardBatch | None = None

    def run(self, *steps: Step, positions: Tensor | None = None, visual: dict[int, Tensor] | None = None) -> Tensor:
        """Compute the steps in one forward pass, and return the logits of all tokens.

        Args:
            steps: the steps.
            positions: [3, tokens] if they are not those of text.
            visual: the visual tokens that replace those beginning at a row.
        """
        spans, states, slots, text_positions = [], [], [], []
        for step in steps:
            sequence, ids = step.sequence, step.ids
            start, first = self.lengths[sequence], len(slots)
            source = self.sources[sequence]
            spans.append(KVSpan(first, len(ids), sequence * self.rows, start + len(ids), start))
            stop = start if step.is_decoding else start + len(ids) - step.num_drafts
            chunks = tuple(self.boundaries.chunks(start, stop))
            states.append(
                StateSpan(first, len(ids), step.num_drafts, source if start else -1, source ^ 1, chunks, step.saved)
            )
            text_positions += range(start, start + len(ids))
            slots += range(sequence * self.rows + start, sequence * self.rows + start + len(ids))
            self.lengths[sequence] += len(ids)
            self.sources[sequence] = source ^ 1
        cos, sin = self.model.rotary(torch.tensor(text_positions).expand(3, -1) if positions is None else positions)
        last = KVSpans(
            [
                KVSpan(span.first_query + query, 1, span.first_key, span.start + query + 1, span.start + query)
                for span in spans
                for query in range(span.num_queries)
            ]
        )
        self.batch = ForwardBatch(
            cos, sin, torch.tensor(slots), KVSpans(spans), torch.arange(len(slots)), last, self.cache.pool,
            cache_scales=self.cache.scales,
            loras=(LoraRows(self.lora, 0, len(slots), 0, len(slots)),) if self.lora else (),
            recurrent=RecurrentBatch(self.states, StateSpans(states), []),
        )  # fmt: skip
        x = self.model.embed(torch.cat([step.ids for step in steps]))
        for row, embedding in (visual or {}).items():
            x[row : row + len(embedding)] = embedding
        return self.model.logits(self.model.forward(x, self.batch))

    def logits(self, ids: Tensor, lengths: Sequence[int], *, sequence: int = 0) -> Tensor:
        """Return the logits of a sequence that is computed in parts; parts of one token are decoded."""
        parts = torch.split(ids, list(lengths))
        return torch.cat([self.run(Step(sequence, part, is_decoding=len(part) == 1)) for part in parts])

    def rewind(self, number: int, step: Step, num_tokens: int) -> None:
        """Keep only the first `num_tokens` tokens of the step with this number of the last forward pass."""
        assert self.batch
        assert self.batch.recurrent
        self.model.rewind(self.batch.recurrent, {number: num_tokens})
        self.lengths[step.sequence] -= len(step.ids) - num_tokens
