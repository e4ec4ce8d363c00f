"""What the processor and the CUDA devices of this machine are. This module does not import torch."""

from __future__ import annotations

import ctypes
import functools
import platform
import re
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def is_cpu(device: str) -> bool:
    """Whether a device, such as `cpu` or `cuda:0`, is the CPU."""
    return device.partition(":")[0] == "cpu"


def cpu_flags() -> frozenset[str]:
    """Return the CPU's features as /proc/cpuinfo spells them; empty if that file cannot be read."""
    match = re.search(r"^(?:flags|Features)\s*: (.*)$", _cpuinfo(), re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def cpu_model() -> str:
    """Return the CPU's model name, or its architecture where the system does not know the name."""
    match = re.search(r"^model name\s*: (.*)$", _cpuinfo(), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def _cpuinfo() -> str:
    try:
        return CPUINFO.read_text(encoding="utf-8")
    except OSError:
        return ""


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
