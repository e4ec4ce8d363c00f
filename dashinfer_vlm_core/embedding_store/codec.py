"""Visual embeddings as bytes that are checked before they are used.

A value is a header, a digest, and the embedding's rows. The digest is HMAC-SHA256 over the key, the header and the
rows: a value cannot be damaged or moved to another key without notice. With a shared secret, only its holders can
create values; without one, the digest finds accidents only.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import struct

import torch

from ..errors import ConfigError
from .client import InvalidValueError

MAGIC = b"DVLE"
VERSION = 1

EXACT, FP8 = 0, 1
"""Formats of the rows: the embedding's own dtype; float8_e4m3fn with a float32 scale for each group of columns."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

GROUP = 128
"""Columns that share a scale in the format `FP8`, or the largest divisor of the width that divides it."""

FP8_MAX = 448.0
"""The largest number of float8_e4m3fn."""

_HEADER = struct.Struct("<4sHBBII")
_DIGEST_BYTES = hashlib.sha256().digest_size
_PREFIX_BYTES = _HEADER.size + _DIGEST_BYTES
_NO_SECRET = b"dashinfer-vlm"


class EmbeddingCodec:
    """Converts the embeddings of one vision encoder to bytes and back. Thread-safe.

    Args:
        example: an embedding of the encoder: values are restored with its width, on its device and in its dtype.
        is_exact: whether embeddings are stored exactly; otherwise in 8 bits per number.
        secret: the shared secret; empty for none.

    Raises:
        ConfigError: the encoder's dtype is not in `DTYPES`.
    """

    def __init__(self, example: torch.Tensor, *, is_exact: bool, secret: bytes = b"") -> None:
        if example.dtype not in DTYPES:
            message = f"`embedding_store` does not support the dtype {example.dtype} of the vision encoder. Remove it."
            raise ConfigError(message, param="embedding_store")
        self._device, self._dtype, self._width = example.device, example.dtype, example.shape[1]
        self._format = EXACT if is_exact else FP8
        self._group = math.gcd(self._width, GROUP)
        self._secret = secret or _NO_SECRET

    def size(self, tokens: int) -> int:
        """Return the size of a value with this number of visual tokens, in bytes."""
        row = self._width * self._dtype.itemsize
        if self._format == FP8:
            row = self._width + 4 * self._width // self._group
        return _PREFIX_BYTES + tokens * row

    def encode(self, key: bytes, embedding: torch.Tensor) -> bytes:
        """Return the value of an embedding [tokens, width]."""
        rows = embedding.cpu().contiguous()
        parts = [rows.view(torch.uint8)] if self._format == EXACT else self._quantize(rows)
        payload = b"".join(part.numpy().tobytes() for part in parts)
        header = self._header(len(embedding))
        return header + self._digest(key, header, memoryview(payload)) + payload

    def decode(self, key: bytes, value: bytes, tokens: int) -> torch.Tensor:
        """Check a value and return its embedding.

        Raises:
            InvalidValueError: it is not a value of this key, encoder and number of tokens, or it was not created with
                the secret.
        """
        if len(value) != self.size(tokens):
            raise InvalidValueError("its size is wrong")
        view = memoryview(value)
        header, digest, payload = view[: _HEADER.size], view[_HEADER.size : _PREFIX_BYTES], view[_PREFIX_BYTES:]
        if header != self._header(tokens):
            raise InvalidValueError("its header is wrong: another version or model wrote it, or it is damaged")
        if not hmac.compare_digest(digest, self._digest(key, header, payload)):
            raise InvalidValueError("its digest is wrong: it is damaged, or was written with another secret")
        embedding = self._restore(bytearray(payload), tokens)  # a copy: torch requires writable memory
        # 20 times as fast as `torch.isfinite` of all numbers: one pass, and both bounds are NaN if any number is.
        if not all(math.isfinite(bound) for bound in torch.aminmax(embedding)):
            raise InvalidValueError("it contains numbers that are not finite")
        return embedding.to(self._device)

    def _header(self, tokens: int) -> bytes:
        return _HEADER.pack(MAGIC, VERSION, self._format, DTYPES[self._dtype], tokens, self._width)

    def _digest(self, key: bytes, header: bytes | memoryview, payload: memoryview) -> bytes:
        code = hmac.new(self._secret, b"value" + key, hashlib.sha256)
        code.update(header)
        code.update(payload)
        return code.digest()

    def _quantize(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the scales, then the numbers in 8 bits."""
        groups = rows.float().view(len(rows), -1, self._group)
        scales = groups.abs().amax(dim=2, keepdim=True).div(FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
        return [scales, (groups / scales).to(torch.float8_e4m3fn).view(torch.uint8)]

    def _restore(self, payload: bytearray, tokens: int) -> torch.Tensor:
        if self._format == EXACT:
            return torch.frombuffer(payload, dtype=self._dtype).view(tokens, self._width)
        groups = tokens * self._width // self._group
        scales = torch.frombuffer(payload, dtype=torch.float32, count=groups).view(groups, 1)
        numbers = torch.frombuffer(payload, dtype=torch.uint8, offset=4 * groups).view(torch.float8_e4m3fn)
        return (numbers.float().view(groups, self._group) * scales).view(tokens, self._width).to(self._dtype)
