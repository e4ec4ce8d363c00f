"""Compute the logits of a given completion, as if its tokens had been sampled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dashinfer_vlm_core.decoders import DecodeRequest

from .kv_cache import KVCache
from .model import TextModel
from .proposer import Draft
from .runner import ModelRunner
from .sampler import LaunchedArgmax, LogitsRow
from .scheduler import ScheduledChunk, SequenceState


class CompletionScorer(ModelRunner):
    """Computes the logits of completions with a KV cache of its own; other sequences may run at the same time.

    Args:
        model: the model.
        kv_tokens: maximum number of tokens of a prompt and its completion.
        cache_dtype: the dtype of the KV cache.
        prefill_chunk: maximum number of prompt tokens of a forward pass.
    """

    def __init__(self, model: TextModel, *, kv_tokens: int, cache_dtype: torch.dtype, prefill_chunk: int) -> None:
        super().__init__(model, KVCache(model.config, kv_tokens, device=model.device, dtype=cache_dtype))
        self._prefill_chunk = prefill_chunk
        self._logits = torch.empty(0)

    def logits(self, request: DecodeRequest, token_ids: Sequence[int]) -> Tensor:
        """Return the logits from which each token of a completion would be sampled, given those before it.

        Args:
            request: the prompt; its sampling parameters are not applied.
            token_ids: the completion, at least one token.

        Returns:
            float32 [tokens, vocab_size], on the model's device.
        """
        sequence = SequenceState.of(request, ())
        sequence.first_row = 0
        length, draft = sequence.prompt_length, Draft(tuple(token_ids[:-1]))
        for start in range(0, length, self._prefill_chunk):
            stop = min(start + self._prefill_chunk, length)
            chunk = ScheduledChunk(sequence, start, stop, draft if stop == length else Draft())
            self.compute(partial(self.step, [chunk]))
        return self._logits

    def _sample(self, x: Tensor, rows: Sequence[LogitsRow], *heads: Any) -> LaunchedArgmax:
        self._logits = self._model.logits(x, *heads)
        return LaunchedArgmax.of(self._logits.argmax(dim=-1))
