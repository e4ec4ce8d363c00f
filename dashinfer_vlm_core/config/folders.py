"""Checks of folders and files that options name."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from pathlib import Path

from .options import variable

logger: logging.Logger = logging.getLogger(__name__)

CACHE_FIX = (
    f"Make it writable, free some space, or choose another folder: `export {variable('cache_dir')}=FOLDER`, or"
    " --cache-dir FOLDER."
)


def expand_user(path: str) -> Path:
    """Return a path with the home folder that `~` or `~name` stands for, if there is such a user.

    `Path.expanduser` raises RuntimeError otherwise.
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111


def write_error(folder: Path) -> str:
    """Create `folder` if it does not exist, and return why no file can be written to it; empty if one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"1")  # on a full disk, a file can be created
    except OSError as error:
        return error.strerror or str(error)
    return ""


def cache_problem(folder: Path, reason: str) -> str:
    """Return a message for a cache folder that cannot be written to."""
    return f"The cache folder {folder} cannot be written to: {reason}. {CACHE_FIX}"


def access_problem(status: os.stat_result) -> str:
    """Return why other users may have changed a trusted file or folder; empty if they cannot have.

    It must belong to this user or root, and its group and others must not be able to write to it.
    """
    if status.st_uid not in {os.geteuid(), 0}:
        return "it belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "other users can write to it"
    return ""


def warn_if_accessible(file: Path, secret: str) -> None:
    """Log a warning if all users of the machine can read or change a file with a secret.

    Args:
        file: the file.
        secret: what it contains, for the message.
    """
    if file.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
        logger.warning(
            "All users of this machine can read or change the %s in %s. Run: chmod 600 %s", secret, file, file
        )
