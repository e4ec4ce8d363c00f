"""CUDA devices, counted without importing torch."""

from __future__ import annotations

import ctypes
import functools


@functools.cache
def cuda_devices() -> int:
    """Return the number of CUDA devices that the driver reports; 0 without a driver.

    The result is cached: the number does not change during the life of the process.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int()
        return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0
    except (OSError, AttributeError):
        return 0
