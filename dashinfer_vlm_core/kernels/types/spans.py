"""The keys that the queries of a batch attend to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..streams import to_device


class KVSpan(NamedTuple):
    """Consecutive queries of a batch and the keys that they attend to.

    Attributes:
        first_query: row of the first query.
        num_queries: number of queries.
        first_key: row of the first key.
        num_keys: number of keys.
        start: query i attends to keys 0 to start + i; -1 if every query attends to all keys.
    """

    first_query: int
    num_queries: int
    first_key: int
    num_keys: int
    start: int = -1


class KeyRanges(NamedTuple):
    """The spans of a batch as tensors on its device, for kernels that compute all of them at once.

    Attributes:
        query_starts: int32 [spans + 1], the row of each span's first query, and the number of queries.
        first_keys: int32 [spans + 1], the row of each span's first key, and a number without meaning.
        num_keys: int32 [spans], the number of keys of each span.
        max_queries: at least the number of queries of each span.
        max_keys: at least the number of keys of each span.
        is_causal: whether each query attends to the keys up to its own, the last query to all keys of its span;
            otherwise, every query attends to all of them.
    """

    query_starts: Tensor
    first_keys: Tensor
    num_keys: Tensor
    max_queries: int
    max_keys: int
    is_causal: bool


class KVSpans:
    """The spans of one batch. Masks and tables are derived from them once, not once per layer.

    Args:
        spans: the spans.
        device: the device of masks and ranges.
        ranges: the spans as tensors, if only these are known; kernels that use anything else must not get such spans.
    """

    def __init__(
        self, spans: Sequence[KVSpan], *, device: torch.device | str = "cpu", ranges: KeyRanges | None = None
    ) -> None:
        self.spans: tuple[KVSpan, ...] = tuple(spans)
        self._device = device
        self._known_ranges = ranges

    @cached_property
    def masks(self) -> list[Tensor | None]:
        """One mask per span, bool [queries, keys], true where a query attends to a key.

        None if there is one query, if all queries attend to all keys, or if the span starts at position 0 and is
        simply causal.
        """
        return [_mask(span, self._device) for span in self.spans]

    @cached_property
    def table(self) -> Tensor:
        """The spans as int64 [spans, 5] on the CPU, in the order of `KVSpan`'s attributes."""
        return torch.tensor(self.spans, dtype=torch.int64)

    @cached_property
    def ranges(self) -> KeyRanges | None:
        """The spans as tensors; None if there are none, or if neither all queries attend to all keys of their span, nor
        all spans are causal and end with their last query."""
        return self._known_ranges or _key_ranges(self.spans, self._device)

    @cached_property
    def packed(self) -> KVSpans:
        """The same spans if the keys of each follow those of the previous one."""
        firsts = accumulate((span.num_keys for span in self.spans), initial=0)
        spans = [span._replace(first_key=first) for first, span in zip(firsts, self.spans, strict=False)]
        return KVSpans(spans, device=self._device)


def _key_ranges(spans: Sequence[KVSpan], device: torch.device | str) -> KeyRanges | None:
    is_causal = all(span.start >= 0 and span.start + span.num_queries == span.num_keys for span in spans)
    if not spans or not (is_causal or all(span.start < 0 for span in spans)):
        return None
    query_starts = [*(span.first_query for span in spans), spans[-1].first_query + spans[-1].num_queries]
    first_keys = [*(span.first_key for span in spans), 0]
    num_keys = [*(span.num_keys for span in spans), 0]
    rows = to_device(torch.tensor([query_starts, first_keys, num_keys], dtype=torch.int32), device)
    max_queries = max(span.num_queries for span in spans)
    return KeyRanges(rows[0], rows[1], rows[2, :-1], max_queries, max(num_keys), is_causal)


def _mask(span: KVSpan, device: torch.device | str) -> Tensor | None:
    if span.start <= 0 or span.num_queries == 1:
        return None
    return torch.ones(span.num_queries, span.num_keys, dtype=torch.bool, device=device).tril(span.start)
