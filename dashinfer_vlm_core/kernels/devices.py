"""What the driver has for torch and other engines to run on."""

from __future__ import annotations

import ctypes
import functools


@functools.cache
def cuda_devices() -> int:
    """Number of CUDA devices, asked of the driver itself; 0 without a driver. It does not change while we run."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int()
        return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0
    except (OSError, AttributeError):
        return 0
