"""CPU features."""

from __future__ import annotations

import platform
import re
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


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
