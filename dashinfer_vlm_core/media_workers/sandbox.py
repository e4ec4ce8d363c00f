"""Restrict a media worker: memory, files, network, processes. Linux only; each part applies where the kernel has it.

A worker runs decoders of hostile files. If one of them is taken over, it still has only its socket: Landlock denies it
the file system, except for reading the Python installation and fonts; a seccomp filter denies it sockets, programs,
processes, signals and changes of files. Both are a few system calls on stable kernel interfaces, so that no library is
needed for them: the maintained ones need a system library, libseccomp, that pip cannot install.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .seccomp import ARCHITECTURES, LIBC, apply_filter, build_filter, has_filter

MAX_FILES = 64
ADDRESS_SPACE_BYTES = 256 << 20
"""For libraries that are imported late, and what the allocator reserves for its arenas."""

_PR_SET_PDEATHSIG = 1
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION = 0x20080522

_SYSTEM_PATHS = (
    *("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64"),
    *("/etc/ld.so.cache", "/dev/null", "/dev/urandom", "/sys/devices/system/cpu"),
    *("/usr/share/fonts", "/usr/local/share/fonts"),  # for documents without their fonts
)

# Landlock, see `landlock(7)`
_LANDLOCK_CREATE_RULESET = 444
_LANDLOCK_ADD_RULE = 445
_LANDLOCK_RESTRICT_SELF = 446
_LANDLOCK_RULE_PATH_BENEATH = 1
_LANDLOCK_READ_FILE = 1 << 2
_LANDLOCK_READ_DIR = 1 << 3
_LANDLOCK_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Number of rights of the file system by version of Landlock; versions from 5 on have one more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sandbox:
    """The restrictions of workers, prepared by the process that forks them.

    Attributes:
        ruleset: a descriptor of Landlock's rules; None without Landlock.
        filter: the seccomp filter; empty without one.
    """

    ruleset: int | None
    filter: bytes

    @classmethod
    def prepare(cls, *, by_list: bool) -> Sandbox:
        """Restrict this process as far as its workers inherit it, and return the other restrictions.

        Args:
            by_list: as in `build_filter`.
        """
        LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _drop_inheritable_capabilities()
        return cls(ruleset=_create_ruleset(readable_paths()), filter=build_filter(by_list=by_list))

    def restrict(self, files: Sequence[int], *, memory_bytes: int) -> None:
        """Restrict this process, which must have a single thread and imported what it needs, for the rest of its life.

        Args:
            files: the only files that stay open, except for the standard streams.
            memory_bytes: how much memory it may allocate in addition to what it has.
        """
        LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _close_files(files if self.ruleset is None else [*files, self.ruleset])
        os.chdir("/")
        _limit_resources(memory_bytes)
        if self.ruleset is not None:
            _call_landlock(_LANDLOCK_RESTRICT_SELF, ctypes.c_int(self.ruleset), ctypes.c_uint(0))
            os.close(self.ruleset)
        _drop_capabilities()
        if self.filter:
            apply_filter(self.filter)


@contextlib.contextmanager
def lower_memory_limit(lower_by: int) -> Iterator[None]:
    """Lower the limit of private memory that `Sandbox.restrict` has set, until the block ends."""
    limit, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit - max(lower_by, 0), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


class MissingRestriction(NamedTuple):
    """A restriction that does not apply on this system.

    Attributes:
        name: its name.
        risk: what a worker can do that a hostile file has taken over.
        fix: what makes it available.
    """

    name: str
    risk: str
    fix: str


def missing_restrictions(machine: str = platform.machine()) -> list[MissingRestriction]:
    """Return the restrictions that `Sandbox` leaves out on this kernel, and on a machine of this kind."""
    missing: list[MissingRestriction] = []
    if _landlock_version() < 1:
        fix = "use Linux 5.13 or newer, with `landlock` in /sys/kernel/security/lsm"
        missing.append(MissingRestriction("Landlock", "read the files of this user", fix))
    if not has_filter(machine):
        fix = f"use {' or '.join(ARCHITECTURES)} instead of {machine}"
        risk = "open connections, start programs and change metadata of files"
        missing.append(MissingRestriction("the seccomp filter", risk, fix))
    return missing


def readable_paths() -> list[str]:
    """Return the paths of the Python installation, of imported packages outside of it, and of system libraries, for
    modules that are imported later; and of fonts."""
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    installed = {folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")}
    packages = {path for name, module in sys.modules.items() if "." not in name for path in _package_paths(module)}
    return sorted({*prefixes, *installed, *packages, *_SYSTEM_PATHS} - {"", "/"})


def _package_paths(module: object) -> list[str]:
    return [path for path in getattr(module, "__path__", ()) if isinstance(path, str)]


def _close_files(keep: Sequence[int]) -> None:
    # Libraries print warnings to the standard streams.
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    first = 3
    for file in sorted(keep):
        os.closerange(first, file)
        first = file + 1
    os.closerange(first, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _limit_resources(memory_bytes: int) -> None:
    pages = [int(field) for field in Path("/proc/self/statm").read_text().split()]
    address_space, data = (resource.getpagesize() * pages[index] for index in (0, 5))
    limits = (
        (resource.RLIMIT_DATA, data + memory_bytes),  # private memory
        (resource.RLIMIT_FSIZE, memory_bytes),  # the file of pixels, which are in private memory first
        (resource.RLIMIT_AS, address_space + 2 * memory_bytes + ADDRESS_SPACE_BYTES),  # both, and libraries
        (resource.RLIMIT_NOFILE, MAX_FILES),
        (resource.RLIMIT_CORE, 0),
    )
    for kind, limit in limits:
        _, hard = resource.getrlimit(kind)
        value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (value, value))


def _drop_inheritable_capabilities() -> None:
    """Drop the capabilities that a program could get. Without a capability, it fails and there is nothing to drop."""
    LIBC.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    for capability in range(64):
        if LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
            break


def _drop_capabilities() -> None:
    header = struct.pack("<Ii", _CAPABILITY_VERSION, 0)
    if LIBC.capset(header, bytes(24)):
        raise OSError(ctypes.get_errno(), "capset failed")


def _landlock_version() -> int:
    # below 1 if the kernel has none
    return int(LIBC.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1)))


def _create_ruleset(readable: Iterable[str]) -> int | None:
    """Create rules that deny access to all files but reading those in `readable`; and TCP, abstract sockets and signals
    to other processes. Return their descriptor; None if the kernel has no Landlock."""
    supported = _landlock_version()
    if supported < 1:
        return None
    rights = (1 << _LANDLOCK_FILE_RIGHTS.get(supported, 16)) - 1
    network = 0b11 if supported >= 4 else 0
    scopes = 0b11 if supported >= 6 else 0
    attributes = struct.pack("<QQQ", rights, network, scopes)[: 24 if supported >= 6 else 16 if supported >= 4 else 8]
    size = ctypes.c_size_t(len(attributes))
    ruleset = _call_landlock(_LANDLOCK_CREATE_RULESET, ctypes.c_char_p(attributes), size, ctypes.c_uint(0))
    for path in readable:
        _allow_reading(ruleset, path)
    return ruleset


def _allow_reading(ruleset: int, path: str) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # this system has no such folder
    allowed = _LANDLOCK_READ_FILE | (_LANDLOCK_READ_DIR if Path(path).is_dir() else 0)
    rule = struct.pack("<Qi", allowed, opened)
    kind = ctypes.c_int(_LANDLOCK_RULE_PATH_BENEATH)
    _call_landlock(_LANDLOCK_ADD_RULE, ctypes.c_int(ruleset), kind, ctypes.c_char_p(rule), ctypes.c_uint(0))
    os.close(opened)


def _call_landlock(number: int, *arguments: ctypes.c_int | ctypes.c_uint | ctypes.c_size_t | ctypes.c_char_p) -> int:
    result = int(LIBC.syscall(number, *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock's system call {number} failed")
    return result
