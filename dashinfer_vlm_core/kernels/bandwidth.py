"""Measure the memory bandwidth, and how fast kernels read weights: they limit how fast a model decodes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch

from .progressive import BYTES as INT4_BYTES
from .quantization import INT4, INT8, Quantization
from .tuned import WeightRates
from .types import Kernels

BYTES = 1 << 29
"""Far beyond any cache."""

WEIGHT_BYTES = 192 << 20
"""Of the layers of a format, together: beyond most caches, and packed in a second."""

WIDTH = 4096
"""Inputs and outputs of a layer."""


def measure_bandwidth(seconds: float = 1.0) -> float:
    """Return at how many bytes per second all cores together read memory: the fastest of the reads in `seconds`."""
    memory = torch.ones(BYTES // 8, dtype=torch.int64)
    return BYTES / min(_durations(memory.sum, seconds))


def measure_rates(
    kernels: Kernels, dtype: torch.dtype, *, seconds: float = 1.5, size: int = WEIGHT_BYTES, width: int = WIDTH
) -> WeightRates:
    """Return how fast products of one row read weights: the median of those in `seconds` for each format.

    Not the fastest: many virtual machines are faster for a second than for the rest of a response.

    A format that the kernels do not support has the rate of `dtype`, to which they convert it. That of 4 bits is of
    weights that are rounded by `quantization` int4.

    Args:
        kernels: the kernels.
        dtype: that of weights that are not quantized.
        seconds: how long each format is measured.
        size: bytes of the layers that are read.
        width: inputs and outputs of a layer.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(width, width, generator=generator).mul_(0.02).to(dtype)

    def measure(bytes_each: float, quantization: Quantization | None) -> float:
        count = math.ceil(size / (bytes_each * weight.numel()))
        layers = [kernels.linear(weight, quantization=quantization) for _ in range(count)]
        x = torch.ones(1, width, dtype=dtype)
        durations = _durations(lambda: [layer(x) for layer in layers], seconds)
        return count * bytes_each * weight.numel() / statistics.median(durations)

    wide = measure(dtype.itemsize * kernels.weight_bits.layer / 16, None)
    return WeightRates(
        wide=wide,
        int8=measure(1, INT8) if kernels.supports_int8 else wide,
        int4=measure(INT4_BYTES, INT4) if kernels.supports_int4 else wide,
    )


def _durations(read: Callable[[], object], seconds: float) -> list[float]:
    """Return the durations of the calls in `seconds`, after one that starts threads."""
    read()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while not found or time.perf_counter() < end:
        begin = time.perf_counter()
        read()
        found.append(time.perf_counter() - begin)
    return found
