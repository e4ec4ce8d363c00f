"""Hash the content of a sequence by blocks, so that the prefix cache finds exact matches only."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt

from dashinfer_vlm_core.decoders import DecodeRequest

BLOCK_SIZE = 16
"""Tokens per digest. The block in which two sequences diverge is compared token by token."""

_COLUMNS = 12
_TOKEN_BYTES = 8 * _COLUMNS
_OUTPUT_TOKEN = struct.Struct(f"={_COLUMNS}q")


class PrefixHash:
    """The content of a prompt and its output on which keys and values depend.

    Keys and values of a token depend on the token, its position, and all preceding tokens. A token is identified by its
    id and, if it is a visual token, by the content digest, the grid and its index in the grid: 96 bytes per token. If
    the temporal patches of a video are encoded separately, these are those of the patch, so that a video that continues
    another one begins with its tokens. The digest of each whole block covers all preceding blocks, the request's
    `cache_salt` and its LoRA adapter. It is cryptographic, since a caller who finds a collision could use the cached
    prompt of another one.

    Attributes:
        digests: one per whole block.
        cache_salt: the salt of the request.
    """

    def __init__(self, request: DecodeRequest) -> None:
        self._rows = bytearray(_describe(request).tobytes())
        self.cache_salt: str = request.cache_salt
        self._salt = _digest(request.cache_salt.encode())
        if request.lora:
            self._salt = _digest(self._salt, request.lora.digest)
        self.digests: list[bytes] = []
        self._digest_blocks()

    def __len__(self) -> int:
        return len(self._rows) // _TOKEN_BYTES

    def append(self, token: int, position: int) -> None:
        """Append an output token."""
        self._rows += _OUTPUT_TOKEN.pack(token, position, position, position, *[0] * (_COLUMNS - 4))
        self._digest_blocks()

    def digest(self, num_tokens: int) -> bytes:
        """Return the digest of the first `num_tokens` tokens, which need not end with a block."""
        num_blocks = num_tokens // BLOCK_SIZE
        before = self.digests[num_blocks - 1] if num_blocks else self._salt
        rest = self._rows[num_blocks * BLOCK_SIZE * _TOKEN_BYTES : num_tokens * _TOKEN_BYTES]
        return _digest(before, rest) if rest else before

    def truncated(self, tokens: int) -> PrefixHash:
        """Return a copy with the first `tokens` tokens."""
        prefix = object.__new__(PrefixHash)
        prefix._rows = self._rows[: tokens * _TOKEN_BYTES]
        prefix.cache_salt = self.cache_salt
        prefix._salt = self._salt
        prefix.digests = self.digests[: tokens // BLOCK_SIZE]
        return prefix

    def common_length(self, other: PrefixHash, start: int) -> int:
        """Number of equal tokens from `start` on, at most one block."""
        count = 0
        while count < BLOCK_SIZE and (row := self._row(start + count)) and row == other._row(start + count):
            count += 1
        return count

    def _row(self, index: int) -> bytearray:
        return self._rows[index * _TOKEN_BYTES : (index + 1) * _TOKEN_BYTES]

    def _digest_blocks(self) -> None:
        size = BLOCK_SIZE * _TOKEN_BYTES
        for start in range(len(self.digests) * size, len(self._rows) - size + 1, size):
            before = self.digests[-1] if self.digests else self._salt
            self.digests.append(_digest(before, self._rows[start : start + size]))


def _describe(request: DecodeRequest) -> npt.NDArray[np.int64]:
    """[length, 12]: id, position (3), and for visual tokens the grid (3), the index in it, and the digest (32
    bytes)."""
    rows = np.zeros((len(request.token_ids), _COLUMNS), np.int64)
    rows[:, 0] = request.token_ids
    rows[:, 1:4] = request.positions.T
    for span in request.spans:
        part = rows[span.start : span.stop]
        tokens = span.tokens
        units = tokens.units or (tokens.digest,)
        unit, index = np.divmod(np.arange(span.row, span.row + len(part)), tokens.tokens // len(units))
        part[:, 4:7] = tokens.grid._replace(t=tokens.grid.t // len(units))
        part[:, 7] = index
        part[:, 8:] = np.frombuffer(b"".join(units), np.int64).reshape(len(units), -1)[unit]
    return rows


def _digest(*parts: bytes | bytearray) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        digest.update(part)
    return digest.digest()
