"""Encoded media -> Patches, in worker processes that can be limited and killed, or in threads."""

from __future__ import annotations

from .pool import MediaWorkerPool, WorkerLimit, create_executor, default_workers
from .threads import MediaExecutor, MediaThreads, MediaWorkerStats, TokenBudget

__all__ = [
    "MediaExecutor",
    "MediaThreads",
    "MediaWorkerPool",
    "MediaWorkerStats",
    "TokenBudget",
    "WorkerLimit",
    "create_executor",
    "default_workers",
]
