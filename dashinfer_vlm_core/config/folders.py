"""Checks of folders that options name."""

from __future__ import annotations

import os
import stat
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


def access_problem(status: os.stat_result) -> str:
    """Return why other users may have changed a file or folder whose content is executed; empty if they cannot have.

    It must belong to this user or root, and its group and others must not be able to write to it.
    """
    if status.st_uid not in {os.geteuid(), 0}:
        return "it belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "other users can write to it"
    return ""
