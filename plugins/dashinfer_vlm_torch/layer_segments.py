"""Run the layers of a decoder in segments, to return hidden states between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dashinfer_vlm_core.kernels.types import (
    Additions,
    Attention,
    DecoderLayer,
    DecoderLayers,
    DecoderShape,
    ForwardBatch,
    Kernels,
    LoraLayers,
    LoraRows,
    RecurrentStates,
)


class Segment(NamedTuple):
    """Consecutive layers.

    Attributes:
        layers: the layers.
        start: index of the first one.
        stop: index after the last one.
        cache_layers: their layers of the KV cache.
        state_layers: their layers of the recurrent states.
    """

    layers: DecoderLayers
    start: int
    stop: int
    cache_layers: slice
    state_layers: slice


class LayerSegments:
    """The layers of a decoder; implements `DecoderLayers`.

    Args:
        kernels: the kernels.
        layers: the layers.
        shape: their shape.
        captured: the numbers of layers after which hidden states are returned, fewer than all.
    """

    def __init__(
        self, kernels: Kernels, layers: Sequence[DecoderLayer], shape: DecoderShape, captured: Sequence[int]
    ) -> None:
        self._captured = tuple(captured)
        self._segments: list[Segment] = []
        self._loras: WeakKeyDictionary[LoraLayers, list[LoraLayers]] = WeakKeyDictionary()
        counts = [0, *accumulate(isinstance(layer.mixer, Attention) for layer in layers)]
        for start, stop in pairwise(sorted({0, *captured, len(layers)})):
            part = kernels.decoder_layers(layers[start:stop], shape)
            cache_layers = slice(counts[start], counts[stop])
            state_layers = slice(start - counts[start], stop - counts[stop])
            self._segments.append(Segment(part, start, stop, cache_layers, state_layers))

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        return self.run(x, batch)[0]

    def run(self, x: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return the hidden states after the last layer, see `DecoderLayers`, and those after the captured layers of
        all tokens, concatenated: [tokens, hidden_size of each]."""
        states: dict[int, Tensor] = {}
        everything = torch.arange(len(x), device=x.device)
        for number, segment in enumerate(self._segments):
            part = self._part(number, batch)
            if segment is not self._segments[-1]:
                part = part._replace(
                    last=everything,
                    last_spans=batch.spans,
                    loras=tuple(rows._replace(last_start=rows.start, last_stop=rows.stop) for rows in part.loras),
                )
            # A copy, because layers overwrite their input.
            x = segment.layers(x.clone() if segment.start else x, part)
            if segment is not self._segments[-1]:
                _add_level(x, segment.stop - 1, batch.additions)
                states[segment.stop] = x
        return x, torch.cat([states[number] for number in self._captured], dim=-1)

    def _part(self, number: int, batch: ForwardBatch) -> ForwardBatch:
        segment = self._segments[number]
        additions = batch.additions
        if additions:
            values = additions.values[segment.start : segment.stop - 1]
            additions = additions._replace(values=values) if len(values) else None
        recurrent = batch.recurrent
        if recurrent:
            states = RecurrentStates(*(part[segment.state_layers] for part in recurrent.states))
            recurrent = recurrent._replace(states=states)
        return batch._replace(
            cache=batch.cache[segment.cache_layers],
            cache_scales=None if batch.cache_scales is None else batch.cache_scales[segment.cache_layers],
            additions=additions,
            loras=tuple(self._lora_rows(number, rows) for rows in batch.loras),
            recurrent=recurrent,
        )

    def _lora_rows(self, number: int, rows: LoraRows) -> LoraRows:
        # Kept, because kernels keep their form of an adapter as long as it exists.
        if rows.lora not in self._loras:
            layers = rows.lora.layers
            self._loras[rows.lora] = [LoraLayers(layers[part.start : part.stop]) for part in self._segments]
        return rows._replace(lora=self._loras[rows.lora][number])


def _add_level(x: Tensor, number: int, additions: Additions | None) -> None:
    """Add the values of layer `number`, which is the last one of a segment."""
    if additions and number < len(additions.values):
        x.index_add_(0, additions.rows, additions.values[number])
