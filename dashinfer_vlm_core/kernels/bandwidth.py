"""Measure the memory bandwidth, which limits how fast a model decodes."""

from __future__ import annotations

import time

import torch

BYTES = 1 << 29
"""Far beyond any cache."""


def measure_bandwidth(seconds: float = 1.0) -> float:
    """Return at how many bytes per second all cores together read memory: the fastest of the reads in `seconds`."""
    memory = torch.ones(BYTES // 8, dtype=torch.int64)
    best = float("inf")
    memory.sum()  # starts the threads
    end = time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        begin = time.perf_counter()
        memory.sum()
        best = min(best, time.perf_counter() - begin)
    return BYTES / best
