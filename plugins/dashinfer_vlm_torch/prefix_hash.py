"""What stands where in a sequence, so that equal beginnings can be found and nothing else."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt

from dashinfer_vlm_core.decoders import DecodeRequest

BLOCK = 16
"""Tokens that are looked up together; the block in which two sequences part is compared token by token."""

_COLUMNS = 12
_WIDTH = 8 * _COLUMNS
_TEXT = struct.Struct(f"={_COLUMNS}q")


class PrefixHash:
    """A prompt and the answer so far, as far as keys and values depend on them.

    Keys and values of a token follow from what it is, from its position, and from all tokens before it. What it is, is
    its id, and for a visual token the content (by digest), the grid, and its place in the grid. All of that is kept,
    96 bytes per token. Each whole block has a digest that covers every block before it and the request's salt; it is
    cryptographic, since whoever finds two equal ones reads another's prompt.

    Attributes:
        digests: one per whole block.
    """

    def __init__(self, request: DecodeRequest) -> None:
        self._rows = bytearray(_describe(request).tobytes())
        self._salt = _digest(request.cache_salt.encode())
        self.digests: list[bytes] = []
        self._digest_blocks()

    def __len__(self) -> int:
        return len(self._rows) // _WIDTH

    def append(self, token: int, position: int) -> None:
        """Go on by a token of the answer."""
        self._rows += _TEXT.pack(token, position, position, position, *[0] * (_COLUMNS - 4))
        self._digest_blocks()

    def truncated(self, tokens: int) -> PrefixHash:
        """A trail of its own of the first `tokens`."""
        prefix = object.__new__(PrefixHash)
        prefix._rows = self._rows[: tokens * _WIDTH]
        prefix._salt = self._salt
        prefix.digests = self.digests[: tokens // BLOCK]
        return prefix

    def common_length(self, other: PrefixHash, start: int) -> int:
        """How many tokens from `start` on are the same in both: at most a block."""
        count = 0
        while count < BLOCK and (row := self._row(start + count)) and row == other._row(start + count):
            count += 1
        return count

    def _row(self, index: int) -> bytearray:
        return self._rows[index * _WIDTH : (index + 1) * _WIDTH]

    def _digest_blocks(self) -> None:
        size = BLOCK * _WIDTH
        for start in range(len(self.digests) * size, len(self._rows) - size + 1, size):
            before = self.digests[-1] if self.digests else self._salt
            self.digests.append(_digest(before, self._rows[start : start + size]))


def _describe(request: DecodeRequest) -> npt.NDArray[np.int64]:
    """[length, 12]: id, position (3), and for visual tokens grid (3), place in it, and digest (32 bytes)."""
    rows = np.zeros((len(request.token_ids), _COLUMNS), np.int64)
    rows[:, 0] = request.token_ids
    rows[:, 1:4] = request.positions.T
    for span in request.spans:
        part = rows[span.start : span.stop]
        part[:, 4:7] = span.tokens.grid
        part[:, 7] = np.arange(span.row, span.row + len(part))
        part[:, 8:] = np.frombuffer(span.tokens.digest, np.int64)
    return rows


def _digest(*parts: bytes | bytearray) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        digest.update(part)
    return digest.digest()
