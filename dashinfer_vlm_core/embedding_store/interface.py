"""What a store of visual embeddings implements. It stores bytes: their format and their checks are in `codec`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from ..config import EngineConfig


NO_SECRET = b"dashinfer-vlm"
"""Key of digests that protect against accidents only."""


class InvalidValueError(Exception):
    """A stored value is not used; the message gives the reason."""


class Read(NamedTuple):
    """A value to read.

    Attributes:
        key: 64 hexadecimal digits.
        size: its expected size, in bytes. A store reads at most one byte more, so that a value of another size is
            recognized, but does not fill the memory.
    """

    key: str
    size: int


class EmbeddingStore(Protocol):
    """A key-value store, used from one event loop. Its methods may raise any exception and take any time.

    The caller cancels what takes too long, checks each value, and handles exceptions: a store that fails only costs
    time.
    """

    async def get(self, reads: Sequence[Read]) -> Sequence[bytes | None]:
        """Return the values of several keys, in order; None for keys that are not stored."""

    async def put(self, key: str, value: bytes) -> None:
        """Store a value, in place of an earlier one. It may be evicted or expire at any time."""

    async def describe(self) -> str:
        """Return the state of the store for `dashinfer-vlm doctor`, without secrets; raise if it cannot be used."""

    async def close(self) -> None:
        """Release all resources, without waiting for running operations."""


class EmbeddingStoreFactory(Protocol):
    """Opens stores; plugins register it in the `register_embedding_stores` hook.

    Attributes:
        schemes: the schemes of the URLs that it opens, such as `redis`.
    """

    schemes: frozenset[str]

    def open(self, url: str, config: EngineConfig) -> EmbeddingStore:
        """Open a store, which need not be reachable yet.

        Raises:
            ConfigError: the URL or an option is invalid, or the store cannot be used on this machine. The message
                contains no password.
            MissingDependency: an extra is not installed.
        """
