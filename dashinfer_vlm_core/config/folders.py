"""Checks of folders that options name."""

from __future__ import annotations

import tempfile
from pathlib import Path


def write_error(folder: Path) -> str:
    """Create `folder` if it does not exist, and return why no file can be written to it; empty if one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or str(error)
