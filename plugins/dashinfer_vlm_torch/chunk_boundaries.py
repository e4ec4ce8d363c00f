"""Where the chunks end in which gated delta nets compute a sequence."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from dashinfer_vlm_core.kernels.delta_net import CHUNK


class ChunkBoundaries:
    """The boundaries between the chunks of a sequence: where responses begin and end, and every `CHUNK` tokens after
    that.

    Each depends on the tokens before it alone, so prompts that share these share the state. `CHUNK` tokens are counted
    from the last of these places and not from the first token, which would give more chunks.

    Args:
        response_boundaries: `DecodeRequest.response_boundaries`.
    """

    def __init__(self, response_boundaries: Sequence[int]) -> None:
        self._starts = (0, *response_boundaries)

    def at_or_before(self, position: int) -> int:
        """Return the last boundary that is not after `position`."""
        start = self._starts[bisect_right(self._starts, position) - 1]
        return position - (position - start) % CHUNK

    def after(self, position: int) -> int:
        """Return the first boundary after `position`."""
        following = self._starts[bisect_right(self._starts, position) :][:1]
        return min([self.at_or_before(position) + CHUNK, *following])

    def chunks(self, start: int, stop: int) -> Iterator[int]:
        """Yield the numbers of tokens of the chunks from `start` to `stop`."""
        while start < stop:
            end = min(self.after(start), stop)
            yield end - start
            start = end
