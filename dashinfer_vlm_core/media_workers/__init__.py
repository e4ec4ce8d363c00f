"""Encoded media -> Patches, in worker processes that can be limited and killed, or in threads."""

from __future__ import annotations

from .pool import MediaWorkerPool, create_executor
from .threads import MEDIA_THREADS, MediaExecutor, MediaThreads, MediaWorkerStats, TokenBudget

__all__ = [
    "MEDIA_THREADS",
    "MediaExecutor",
    "MediaThreads",
    "MediaWorkerPool",
    "MediaWorkerStats",
    "TokenBudget",
    "create_executor",
]
