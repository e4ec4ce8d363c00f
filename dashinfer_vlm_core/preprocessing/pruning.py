"""Prompts without the visual tokens that the language model does not receive; the others keep their positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..media.types import VisualInput
from ..models.interface import PlaceholderSpan


class PlacedTokens(NamedTuple):
    """The tokens of a prompt: their ids, int64 [length], positions, int64 [3, length], and spans of visual tokens."""

    ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    spans: list[PlaceholderSpan]


def drop_pruned(tokens: PlacedTokens, visuals: Sequence[VisualInput]) -> PlacedTokens:
    """Return the tokens without placeholders of pruned visual tokens.

    Before the vision encoder, when these are not known, the first ones of each item are kept: the number is the same.
    """
    if all(item.kept_tokens == item.tokens for item in visuals):
        return tokens
    kept = np.ones(len(tokens.ids), np.bool_)
    rows = [_is_kept(item) for item in visuals]
    for span in tokens.spans:
        kept[span.start : span.start + span.length] = rows[span.item][span.row : span.row + span.length]
    spans = [_without_pruned(span, kept, rows[span.item]) for span in tokens.spans]
    return PlacedTokens(tokens.ids[kept], tokens.positions[:, kept], [span for span in spans if span.length])


def _is_kept(item: VisualInput) -> npt.NDArray[np.bool_]:
    kept = np.zeros(item.tokens, np.bool_)
    kept[slice(item.kept_tokens) if item.kept_rows is None else item.kept_rows] = True
    return kept


def _without_pruned(span: PlaceholderSpan, kept: npt.NDArray[np.bool_], rows: npt.NDArray[np.bool_]) -> PlaceholderSpan:
    return PlaceholderSpan(
        start=int(kept[: span.start].sum()),
        length=int(kept[span.start : span.start + span.length].sum()),
        item=span.item,
        row=int(rows[: span.row].sum()),
    )
