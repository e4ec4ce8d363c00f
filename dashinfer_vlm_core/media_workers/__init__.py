"""Encoded media -> Patches, in worker processes that can be limited and killed, or in threads."""

from __future__ import annotations

from .pool import MediaWorkerPool, WorkerLimit, create_executor, default_workers
from .threads import MEDIA_THREADS, MediaExecutor, MediaThreads, MediaWorkerStats, TokenBudget

__all__ = [
    "MEDIA_THREADS",
    "MediaExecutor",
    "MediaThreads",
    "MediaWorkerPool",
    "MediaWorkerStats",
    "TokenBudget",
    "WorkerLimit",
    "create_executor",
    "default_workers",
]
