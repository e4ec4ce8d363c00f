"""CPU features."""

from __future__ import annotations

import re
from pathlib import Path


def cpu_flags() -> frozenset[str]:
    """Return the CPU's features as /proc/cpuinfo spells them; empty if that file cannot be read."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    match = re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()
