"""Landlock: restrict which files a process can read. See `landlock(7)`."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULE_PATH_BENEATH = 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Number of rights of the file system by version of the interface; versions from 5 on have one more."""


def version() -> int:
    """Return the version of the kernel's interface; below 1 if it has none."""
    return int(_libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1)))


def create_ruleset(readable: Iterable[str]) -> int | None:
    """Create rules that deny access to all files but reading those in `readable`; and TCP, abstract sockets and signals
    to other processes.

    Returns:
        A descriptor for `restrict_self`; None if the kernel has no Landlock.
    """
    supported = version()
    if supported < 1:
        return None
    rights = (1 << _FILE_RIGHTS.get(supported, 16)) - 1
    network = 0b11 if supported >= 4 else 0
    scopes = 0b11 if supported >= 6 else 0
    attributes = struct.pack("<QQQ", rights, network, scopes)[: 24 if supported >= 6 else 16 if supported >= 4 else 8]
    ruleset = int(
        _libc().syscall(
            _CREATE_RULESET, ctypes.c_char_p(attributes), ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)
        )
    )
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset failed")
    for path in readable:
        _allow_reading(ruleset, path)
    return ruleset


def restrict_self(ruleset: int) -> None:
    """Apply rules to this thread and those that it starts, for the rest of their lives."""
    if _libc().syscall(_RESTRICT_SELF, ruleset, ctypes.c_uint(0)):
        raise OSError(ctypes.get_errno(), "landlock_restrict_self failed")


def _allow_reading(ruleset: int, path: str) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # this system has no such folder
    allowed = _READ_FILE | (_READ_DIR if Path(path).is_dir() else 0)
    rule = struct.pack("<Qi", allowed, opened)
    if _libc().syscall(_ADD_RULE, ruleset, ctypes.c_int(_RULE_PATH_BENEATH), ctypes.c_char_p(rule), ctypes.c_uint(0)):
        raise OSError(ctypes.get_errno(), "landlock_add_rule failed")
    os.close(opened)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
