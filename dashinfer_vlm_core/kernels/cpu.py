"""What the processor can do."""

from __future__ import annotations

import re
from pathlib import Path


def cpu_flags() -> frozenset[str]:
    """The processor's features in Linux's words; empty where they cannot be known."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()
