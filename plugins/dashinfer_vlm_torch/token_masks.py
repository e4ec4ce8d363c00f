"""Which tokens the rows of a step may sample: what grammars allow, and what does not repeat n-grams."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dashinfer_vlm_core.decoders import GrammarMatcher
from dashinfer_vlm_core.errors import DecoderFailed

from .sequence import LogitsRow, SequenceState

Masks: TypeAlias = dict[int, npt.NDArray[np.bool_]]
"""The tokens that a row may sample, bool [vocab_size], by row; others may sample any."""


def token_masks(rows: Sequence[LogitsRow], vocab_size: int) -> tuple[Masks, dict[int, DecoderFailed]]:
    """Return the masks of rows, and the errors of those whose grammar failed."""
    masks: Masks = {}
    errors: dict[int, DecoderFailed] = {}
    matchers: dict[SequenceState, _DraftMatcher] = {}
    for index, row in enumerate(rows):
        banned = row.banned_tokens()
        if row.sequence.matcher:
            matcher = matchers.setdefault(row.sequence, _DraftMatcher(row.sequence.matcher))
            try:
                mask = matcher.allowed_tokens(row.draft)
            except DecoderFailed as error:
                errors[index] = error
                continue
        elif len(banned):
            mask = np.ones(vocab_size, np.bool_)
        else:
            continue
        mask = _without(mask, row.sequence.stops if row.too_short else ())
        masks[index] = _without(mask, banned.tolist())
    return masks, errors


class _DraftMatcher:
    """Advances a copy of a sequence's matcher along its draft: an error after a wrong draft must not affect it."""

    def __init__(self, matcher: GrammarMatcher) -> None:
        self._matcher = matcher
        self._num_accepted = 0

    def allowed_tokens(self, draft: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Return the tokens allowed after `draft`, which begins with the draft of the last call."""
        if draft and not self._num_accepted:
            self._matcher = self._matcher.copy()
        for token in draft[self._num_accepted :]:
            self._matcher.accept_token(token)
        self._num_accepted = len(draft)
        return self._matcher.allowed_tokens()


def _without(mask: npt.NDArray[np.bool_], tokens: Collection[int]) -> npt.NDArray[np.bool_]:
    """Return the mask without some tokens; unchanged if it allows no others, as that of a grammar that must end."""
    if not tokens:
        return mask
    others = mask.copy()
    others[list(tokens)] = False
    return others if others.any() else mask
