"""The memory bandwidth and the matrix rate of a device, as PyTorch reaches them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

ROUNDS = 5
"""The fastest of these counts."""
REPEATS = 10
"""Executions of a round, before it waits for the device."""


@dataclass(frozen=True, kw_only=True)
class DeviceLimits:
    """What the device reaches.

    Attributes:
        bytes_per_second: bytes read and written by a copy of a tensor.
        flop_per_second: floating-point operations of the product of two bfloat16 matrices.
    """

    bytes_per_second: float
    flop_per_second: float


def measure_limits(device: str) -> DeviceLimits:
    """Measure with tensors that fill the device; on a CPU with smaller ones."""
    is_cuda = torch.device(device).type == "cuda"
    count, side = (1 << 30, 8192) if is_cuda else (1 << 25, 256)
    source = torch.ones(count, dtype=torch.uint8, device=device)
    copy = best_seconds(partial(torch.empty_like(source).copy_, source), device)
    matrix = torch.randn(side, side, device=device).to(torch.bfloat16)
    multiply = best_seconds(partial(torch.mm, matrix, matrix, out=torch.empty_like(matrix)), device)
    return DeviceLimits(bytes_per_second=2 * count / copy, flop_per_second=2 * side**3 / multiply)


@torch.inference_mode()
def best_seconds(work: Callable[[], object], device: str, *, rounds: int = ROUNDS, repeats: int = REPEATS) -> float:
    """Return the seconds of one execution of `work` in the fastest round, after a warm-up."""
    work()
    synchronize(device)
    seconds = list[float]()
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(repeats):
            work()
        synchronize(device)
        seconds.append((time.perf_counter() - begin) / repeats)
    return min(seconds)


def synchronize(device: str) -> None:
    """Wait until the device has finished; a CPU has."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
