"""Stores of visual embeddings in Redis or Valkey. Importing this package is cheap: redis-py is imported on use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dashinfer_vlm_core import hookimpl
from dashinfer_vlm_core.errors import ConfigError, extra_required

if TYPE_CHECKING:
    from dashinfer_vlm_core.config import EngineConfig
    from dashinfer_vlm_core.embedding_store import EmbeddingStore, EmbeddingStoreFactory

SCHEMES = {"redis": "redis", "rediss": "rediss", "redis+unix": "unix", "valkey": "redis", "valkeys": "rediss"}
"""The schemes of URLs, with those that redis-py knows: TCP, TLS, and Unix sockets."""


class RedisStoreFactory:
    """See `EmbeddingStoreFactory`."""

    schemes: frozenset[str] = frozenset(SCHEMES)

    def open(self, url: str, config: EngineConfig) -> EmbeddingStore:
        from dashinfer_vlm_core.embedding_store import EmbeddingStoreOptions

        with extra_required("`embedding_store`", extra="server"):
            from .store import RedisStore
        scheme, _, rest = url.partition("://")
        ttl = config.options_of(EmbeddingStoreOptions).embedding_store_ttl
        try:
            return RedisStore(f"{SCHEMES[scheme.lower()]}://{rest}", ttl=ttl)
        except (TypeError, ValueError) as error:  # without its text, which could contain the password
            raise ConfigError(
                "`embedding_store` is not a valid URL of a Redis server. Use redis://USER:PASSWORD@HOST:PORT/DATABASE,"
                " with special characters of the password in percent-encoding.",
                param="embedding_store",
            ) from error


@hookimpl
def register_embedding_stores(register: Callable[[EmbeddingStoreFactory], None]) -> None:
    register(RedisStoreFactory())
