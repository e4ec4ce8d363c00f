"""Which tokens would repeat an n-gram of an output (`no_repeat_ngram_size`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dashinfer_vlm_core.protocol.sampling import Sampling


class NgramBan:
    """Finds the tokens that would complete an n-gram of one sequence's output, in linear time per token.

    The n-grams are those of transformers' `NoRepeatNGramLogitsProcessor` for the output alone; with a window, those of
    vLLM's processor for DeepSeek-OCR.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._prefix_length = sampling.no_repeat_ngram_size - 1
        self._window = sampling.no_repeat_ngram_window
        self._whitelist = sampling.no_repeat_ngram_whitelist
        self._num_equal = np.zeros(0, np.int64)

    def banned_tokens(self, output: npt.NDArray[np.int64], draft: Sequence[int] = ()) -> npt.NDArray[np.int64]:
        """Return the tokens that must not follow a draft of the next tokens.

        Args:
            output: int64 [length], which begins with that of the last call.
            draft: the tokens that are assumed to follow it.
        """
        self._num_equal = _extend(self._num_equal, output)
        tokens = np.concatenate((output, np.array(draft, np.int64)))
        followers = np.flatnonzero(_extend(self._num_equal, tokens) >= self._prefix_length)
        if self._window is not None:
            followers = followers[followers - self._prefix_length >= len(tokens) - self._window]
        return np.setdiff1d(tokens[followers], self._whitelist)


def _extend(num_equal: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return how many of the tokens before each one equal the last tokens, given these counts for a beginning of
    `tokens`."""
    for count in range(len(num_equal), len(tokens)):
        longer = np.where(tokens[:count] == tokens[count], num_equal + 1, 0)
        num_equal = np.concatenate((np.zeros(1, np.int64), longer))
    return num_equal
