"""Encoded media -> Patches, in worker processes that can be limited and killed, or in threads."""

from __future__ import annotations

from .pool import MediaWorkerPool, create_executor
from .threads import MediaExecutor, MediaThreads, ProcessedMedia, TokenBudget

__all__ = ["MediaExecutor", "MediaThreads", "MediaWorkerPool", "ProcessedMedia", "TokenBudget", "create_executor"]
