"""Landlock: restrict which files a process can read. See `landlock(7)`."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path

from .seccomp import LIBC

_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_RULE_PATH_BENEATH = 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Number of rights of the file system by version of the interface; versions from 5 on have one more."""


def version() -> int:
    """Return the version of the kernel's interface; below 1 if it has none."""
    return int(LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1)))


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
    size = ctypes.c_size_t(len(attributes))
    ruleset = _call(_CREATE_RULESET, ctypes.c_char_p(attributes), size, ctypes.c_uint(0))
    for path in readable:
        _allow_reading(ruleset, path)
    return ruleset


def restrict_self(ruleset: int) -> None:
    """Apply rules to this thread and those that it starts, for the rest of their lives."""
    _call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0))


def _allow_reading(ruleset: int, path: str) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # this system has no such folder
    allowed = _READ_FILE | (_READ_DIR if Path(path).is_dir() else 0)
    rule = struct.pack("<Qi", allowed, opened)
    kind = ctypes.c_int(_RULE_PATH_BENEATH)
    _call(_ADD_RULE, ctypes.c_int(ruleset), kind, ctypes.c_char_p(rule), ctypes.c_uint(0))
    os.close(opened)


def _call(number: int, *arguments: ctypes.c_int | ctypes.c_uint | ctypes.c_size_t | ctypes.c_char_p) -> int:
    result = int(LIBC.syscall(number, *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock's system call {number} failed")
    return result
