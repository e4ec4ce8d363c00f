"""Restrict a media worker: memory, files, network, processes. Linux only; each part applies where the kernel has it.

A worker runs decoders of hostile files. If one of them is taken over, it still has only its socket: Landlock denies it
the file system, except for reading the Python installation; a seccomp filter denies it sockets, programs, processes and
signals. Both are a few system calls on stable kernel interfaces (`landlock(7)`, `seccomp(2)`), so that no library is
needed for them: the maintained ones need a system library, libseccomp, that pip cannot install.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

MAX_FILES = 64

_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2

_SYSTEM_PATHS = (
    *("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64"),
    *("/etc/ld.so.cache", "/dev/null", "/dev/urandom", "/sys/devices/system/cpu"),
)


def restrict(files: Sequence[int], *, memory_bytes: int) -> None:
    """Restrict this process, which must have a single thread and imported what it needs, for the rest of its life.

    Args:
        files: the only files that stay open, except for the standard streams.
        memory_bytes: how much memory it may allocate in addition to what it has.
    """
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _close_files(files)
    os.chdir("/")
    _limit_resources(memory_bytes)
    _libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _restrict_files(_readable_folders())
    _filter_system_calls()


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
    """Return the restrictions that `restrict` leaves out on this kernel, and on a machine of this kind."""
    missing: list[MissingRestriction] = []
    if _landlock_version() < 1:
        fix = "use Linux 5.13 or newer, with `landlock` in /sys/kernel/security/lsm"
        missing.append(MissingRestriction("Landlock", "read the files of this user", fix))
    if not _has_system_call_numbers(machine):
        fix = f"use {' or '.join(_DENIED)} instead of {machine}"
        missing.append(MissingRestriction("the seccomp filter", "open connections and start programs", fix))
    return missing


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _close_files(keep: Sequence[int]) -> None:
    """Close all other files, and connect the standard streams to /dev/null: libraries print warnings there."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    first = 3
    for file in sorted(keep):
        os.closerange(first, file)
        first = file + 1
    os.closerange(first, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _limit_resources(memory_bytes: int) -> None:
    data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    limits = (
        # Not RLIMIT_AS, which also counts the address space that the allocator reserves for each thread.
        (resource.RLIMIT_DATA, data + memory_bytes),
        (resource.RLIMIT_FSIZE, memory_bytes),  # of the shared memory
        (resource.RLIMIT_NOFILE, MAX_FILES),
        (resource.RLIMIT_CORE, 0),
    )
    for kind, limit in limits:
        _, hard = resource.getrlimit(kind)
        value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (value, value))


def _readable_folders() -> list[str]:
    """Return the folders of the Python installation and of system libraries, for modules that are imported later."""
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    packages = {folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")}
    code = {str(Path(__file__).parents[2])}
    return sorted({*prefixes, *packages, *code, *_SYSTEM_PATHS} - {"", "/"})


# Landlock

_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_RULE_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Number of rights of the file system by version of the interface; versions from 5 on have one more."""


def _restrict_files(readable: Iterable[str]) -> None:
    """Deny access to all files but reading those in `readable`; and TCP, abstract sockets and signals to others."""
    libc, version = _libc(), _landlock_version()
    if version < 1:
        return  # an older kernel, or Landlock is disabled
    rights = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    network = 0b11 if version >= 4 else 0
    scopes = 0b11 if version >= 6 else 0
    attributes = struct.pack("<QQQ", rights, network, scopes)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    ruleset = libc.syscall(
        _LANDLOCK_CREATE_RULESET, ctypes.c_char_p(attributes), ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)
    )
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset failed")
    for folder in readable:
        _allow_reading(libc, ruleset, folder)
    if libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, ctypes.c_uint(0)):
        raise OSError(ctypes.get_errno(), "landlock_restrict_self failed")
    os.close(ruleset)


def _landlock_version() -> int:
    """Return the version of the kernel's interface; below 1 if it has none."""
    return int(_libc().syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1)))


def _allow_reading(libc: ctypes.CDLL, ruleset: int, path: str) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # this system has no such folder
    allowed = _READ_FILE | (_READ_DIR if Path(path).is_dir() else 0)
    rule = struct.pack("<Qi", allowed, opened)
    if libc.syscall(
        _LANDLOCK_ADD_RULE, ruleset, ctypes.c_int(_LANDLOCK_RULE_PATH_BENEATH), ctypes.c_char_p(rule), ctypes.c_uint(0)
    ):
        raise OSError(ctypes.get_errno(), "landlock_add_rule failed")
    os.close(opened)


# seccomp

_LOAD, _JUMP_EQUAL, _JUMP_ANY_BIT, _JUMP_GREATER_EQUAL, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _DENY, _MISSING, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _FIRST_ARGUMENT_OFFSET = 0, 4, 16
_CLONE_THREAD = 0x10000
_X32_BIT = 0x40000000

# Numbers of system calls, for x86-64 and for the generic table that aarch64 uses.
_DENIED: dict[str, tuple[int, Sequence[int], int, int]] = {
    # machine: audit architecture, denied calls, clone, clone3
    "x86_64": (
        0xC000003E,
        (
            *(41, 42, 43, 49, 50, 53, 288),  # socket, connect, accept, bind, listen, socketpair, accept4
            *(57, 58, 59, 322),  # fork, vfork, execve, execveat
            *(62, 200, 234, 424, 129, 297),  # kill, tkill, tgkill, pidfd_send_signal, rt_sigqueueinfo and its variant
            *(101, 310, 311, 438, 434),  # ptrace, process_vm_readv, process_vm_writev, pidfd_getfd, pidfd_open
            *(425, 426, 427, 321, 298, 323),  # io_uring_setup, _enter, _register, bpf, perf_event_open, userfaultfd
            *(248, 249, 250, 165, 272, 308),  # add_key, request_key, keyctl, mount, unshare, setns
        ),
        56,
        435,
    ),
    "aarch64": (
        0xC00000B7,
        (
            *(198, 203, 202, 200, 201, 199, 242),  # as above
            *(221, 281),
            *(129, 130, 131, 424, 138, 240),
            *(117, 270, 271, 438, 434),
            *(425, 426, 427, 280, 241, 282),
            *(217, 218, 219, 40, 97, 268),
        ),
        220,
        435,
    ),
}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _filter_system_calls() -> None:
    """Deny sockets, programs, processes and signals with EPERM; threads are allowed."""
    if not _has_system_call_numbers(platform.machine()):
        return
    code = b"".join(struct.pack("<HBBI", *instruction) for instruction in _instructions(*_DENIED[platform.machine()]))
    program = _Program(len(code) // 8, code)
    if _libc().prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0):
        number = ctypes.get_errno()
        if number != errno.EINVAL:  # a kernel without seccomp filters
            raise OSError(number, "prctl(PR_SET_SECCOMP) failed")


def _has_system_call_numbers(machine: str) -> bool:
    return machine in _DENIED and sys.maxsize > 2**32


def _instructions(architecture: int, denied: Sequence[int], clone: int, clone3: int) -> list[tuple[int, int, int, int]]:
    """Return a BPF program of (operation, jump if true, jump if false, operand)."""
    checks = [instruction for number in denied for instruction in ((_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _DENY))]
    return [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
        (_JUMP_GREATER_EQUAL, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _KILL),
        *checks,
        (_JUMP_EQUAL, 0, 1, clone3),  # its flags are in memory, which a filter cannot read; libc falls back to clone
        (_RETURN, 0, 0, _MISSING),
        (_JUMP_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_OFFSET),
        (_JUMP_ANY_BIT, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, _DENY),
        (_RETURN, 0, 0, _ALLOW),
    ]
