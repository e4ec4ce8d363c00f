"""The store in Redis or Valkey: one string per embedding, with an expiration time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from dashinfer_vlm_core.embedding_store import Read

KEY_PREFIX = "dashinfer-vlm:embedding:"

MAX_CONNECTIONS = 16
"""Further operations wait for a connection, within their time budget."""

CONNECT_TIMEOUT = 5.0
SOCKET_TIMEOUT = 10.0
"""Seconds. The time budget of an operation is usually shorter; these end what its cancellation does not."""


class RedisStore:
    """A store in one database of a server. All values of a lookup are read in one round trip.

    Args:
        url: the URL, as redis-py defines it.
        ttl: seconds after the last use of a value when it expires.

    Raises:
        ValueError: the URL is invalid.
    """

    def __init__(self, url: str, *, ttl: int) -> None:
        # One retry without a pause: the server closes idle connections, and all of them when it restarts.
        pool: Any = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=SOCKET_TIMEOUT,
            socket_connect_timeout=CONNECT_TIMEOUT,
            socket_timeout=SOCKET_TIMEOUT,
            retry=Retry(NoBackoff(), 1),
            protocol=2,  # one round trip less for a new connection, and no messages that were not requested
        )
        self._client: Any = Redis.from_pool(pool)
        self._ttl = ttl

    async def get(self, reads: Sequence[Read]) -> list[bytes | None]:
        """Read at most one byte more than expected of each value, and extend its time to live."""
        pipeline = self._client.pipeline(transaction=False)
        for read in reads:
            pipeline.getrange(KEY_PREFIX + read.key, 0, read.size)
        for read in reads:
            pipeline.expire(KEY_PREFIX + read.key, self._ttl)
        replies = await pipeline.execute(raise_on_error=False)
        values = replies[: len(reads)]
        for value in values:
            if isinstance(value, Exception):
                raise value
        return [value or None for value in values]  # of a missing key, the range is empty

    async def put(self, key: str, value: bytes) -> None:
        await self._client.set(KEY_PREFIX + key, value, ex=self._ttl)

    async def describe(self) -> str:
        await self._client.ping()
        info = await self._client.info()
        name = "Valkey" if "valkey_version" in info else "Redis"
        version = info.get("valkey_version", info["redis_version"])
        limit = info["maxmemory_human"] if info["maxmemory"] else "no limit"
        return (
            f"{name} {version}, {info['used_memory_human']} used, maxmemory: {limit}, maxmemory-policy:"
            f" {info['maxmemory_policy']}"
        )

    async def close(self) -> None:
        await self._client.aclose()
