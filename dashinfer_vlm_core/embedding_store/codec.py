"""Visual embeddings as bytes that are checked before they are used.

A value is a digest and the embedding's rows. The digest is HMAC-SHA256 over the key, the data type, the width and the
rows: a value cannot be damaged or moved to another key without notice. With a shared secret, only its holders can
create values; without one, the digest finds accidents only.
"""

from __future__ import annotations

import hashlib
import hmac
import math

import numpy as np
import torch

from .interface import NO_SECRET, InvalidValueError

DIGEST_BYTES = hashlib.sha256().digest_size


class EmbeddingCodec:
    """Converts the embeddings of one vision encoder to bytes and back. Thread-safe.

    Args:
        example: an embedding of the encoder: values are restored with its width, on its device and in its dtype.
        secret: the shared secret; empty for none.
    """

    def __init__(self, example: torch.Tensor, *, secret: bytes = b"") -> None:
        self._device = example.device
        self._dtype = example.dtype
        self._width = example.shape[1]
        self._secret = secret or NO_SECRET

    def size(self, tokens: int) -> int:
        """Return the size of a value with this number of visual tokens, in bytes."""
        return DIGEST_BYTES + tokens * self._width * self._dtype.itemsize

    def encode(self, key: bytes, embedding: torch.Tensor) -> bytes:
        """Return the value of an embedding [tokens, width]."""
        payload = embedding.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return self._digest(key, payload) + payload

    def decode(self, key: bytes, value: bytes, tokens: int) -> torch.Tensor:
        """Check a value and return its embedding.

        Raises:
            InvalidValueError: it is not a value of this key, encoder and number of tokens, or it was not created with
                the secret.
        """
        if len(value) != self.size(tokens):
            raise InvalidValueError("its size is wrong")
        payload = memoryview(value)[DIGEST_BYTES:]
        if not hmac.compare_digest(value[:DIGEST_BYTES], self._digest(key, payload)):
            raise InvalidValueError("its digest is wrong: it is damaged, or was written with another secret")
        copy = bytearray(payload)  # torch requires writable memory
        if not _is_finite(copy, self._dtype):
            raise InvalidValueError("it contains numbers that are not finite")
        return torch.frombuffer(copy, dtype=self._dtype).view(tokens, self._width).to(self._device)

    def _digest(self, key: bytes, payload: bytes | memoryview) -> bytes:
        code = hmac.new(self._secret, b"value" + key, hashlib.sha256)
        code.update(f"{self._dtype} {self._width} ".encode())
        code.update(payload)
        return code.digest()


def _is_finite(rows: bytearray, dtype: torch.dtype) -> bool:
    """Whether all numbers are finite: without the sign, the bits of the others are not smaller than those of infinity.

    Torch's operators would start a second team of OpenMP's threads on this thread, which slows down every step.
    """
    kind = np.dtype(f"u{dtype.itemsize}")
    infinity = torch.tensor([math.inf], dtype=dtype).view(torch.uint8).numpy().view(kind)[0]
    magnitudes = np.frombuffer(rows, kind) & (np.iinfo(kind).max >> 1)
    return bool(magnitudes.max(initial=0) < infinity)
