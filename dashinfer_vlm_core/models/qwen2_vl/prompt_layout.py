"""The prompt layout of Qwen2-VL: one sequence of placeholders per image or video, and M-RoPE positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ...media.types import Grid, VisualInput
from ..interface import Expansion, Placeholder, PlaceholderSpan
from ..spec import ModelSpec


class Qwen2VLPromptLayout:
    """See `PromptLayout`."""

    def __init__(self, spec: ModelSpec) -> None:
        self._token = {"image": spec.tokens.image, "video": spec.tokens.video}
        self._merge = spec.pixels.merge_size
        self.placeholders: Sequence[Placeholder] = (
            Placeholder("image", (spec.tokens.image,)),
            Placeholder("video", (spec.tokens.video,)),
        )

    def expand(self, item: VisualInput, encode: Callable[[str], Sequence[int]]) -> Expansion:
        return Expansion(np.full(item.tokens, self._token[item.kind], np.int64), ((0, item.tokens),))

    def positions(
        self, length: int, spans: Sequence[PlaceholderSpan], items: Sequence[VisualInput]
    ) -> npt.NDArray[np.int64]:
        visuals = [items[span.item] for span in spans]
        grids = [visual.grid for visual in visuals]
        return mrope_positions(length, spans, grids, merge=self._merge, times=[*map(self.times, visuals)])

    def times(self, visual: VisualInput) -> npt.NDArray[np.int64]:
        """Return the temporal position of each frame of the grid, ascending from 0."""
        return np.array(visual.steps or range(visual.grid.t), np.int64)


def mrope_positions(
    length: int,
    spans: Sequence[PlaceholderSpan],
    grids: Sequence[Grid],
    *,
    merge: int,
    times: Sequence[npt.NDArray[np.int64]] | None = None,
) -> npt.NDArray[np.int64]:
    """Return the positions of a prompt along time, height and width, int64 [3, length]; spans in prompt order.

    Text tokens advance on all three axes together. The position of a visual token is the start of its span plus its
    frame, row and column, and the next token's position is the largest position so far + 1. Source: the Qwen2-VL paper
    (arXiv:2409.12191, section 2.1) and the code published with it.

    Args:
        length: number of tokens of the prompt.
        spans: one per image or video, in the order of the prompt.
        grids: the grid of each span.
        merge: patches per side of a visual token.
        times: for each span, the temporal position of each of its `grid.t` frames, ascending from 0; without it, they
            are 0, 1, 2, ...
    """
    positions = np.empty((3, length), np.int64)
    index = position = 0
    for number, (span, grid) in enumerate(zip(spans, grids, strict=True)):
        text = span.start - index
        positions[:, index : span.start] = np.arange(position, position + text)
        visual = np.indices((grid.t, grid.h // merge, grid.w // merge)).reshape(3, -1)
        if times is not None:
            visual[0] = times[number][visual[0]]
        positions[:, span.start : span.start + span.length] = position + text + visual
        index = span.start + span.length
        position += text + int(visual.max()) + 1
    positions[:, index:] = np.arange(position, position + length - index)
    return positions
