"""System calls of media workers: their numbers on x86-64, and in the generic table, which aarch64 uses.

`ALLOWED` is what decoders, Python and libc were seen to call, and what the next version of one of them may call for the
same purpose: memory, threads, clocks, and files and descriptors that are open or opened for reading.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple


class Numbers(NamedTuple):
    """The numbers of a system call; None where it does not exist."""

    x86_64: int | None
    aarch64: int | None

    def on(self, machine: str) -> int | None:
        """Return the number on a machine, as `platform.machine` names it."""
        return {"x86_64": self.x86_64, "aarch64": self.aarch64}[machine]


class ArgumentRule(NamedTuple):
    """A system call that is allowed with some values of an argument.

    Attributes:
        numbers: the call.
        argument: its index, from 0 on.
        allowed: the values that are allowed by the list.
        denied: the values that are denied where there is no list; None for all that are not allowed.
    """

    numbers: Numbers
    argument: int
    allowed: tuple[int, ...]
    denied: tuple[int, ...] | None


ALLOWED: Mapping[str, int] = dict(
    (
        # files and descriptors
        *(("read", 0), ("write", 1), ("close", 3), ("lseek", 8)),
        *(("pread64", 17), ("readv", 19), ("writev", 20), ("fadvise64", 221)),
        *(("stat", 4), ("fstat", 5), ("lstat", 6), ("newfstatat", 262)),
        *(("statx", 332), ("statfs", 137), ("fstatfs", 138)),
        *(("access", 21), ("faccessat", 269), ("faccessat2", 439)),
        *(("readlink", 89), ("readlinkat", 267), ("getcwd", 79)),
        *(("getdents64", 217), ("dup", 32), ("dup2", 33), ("dup3", 292)),
        *(("close_range", 436), ("pipe", 22), ("pipe2", 293)),
        *(("poll", 7), ("ppoll", 271), ("select", 23), ("pselect6", 270)),
        *(("sendto", 44), ("recvfrom", 45), ("ftruncate", 77)),
        # memory
        *(("mprotect", 10), ("munmap", 11), ("brk", 12)),
        *(("mremap", 25), ("mincore", 27), ("madvise", 28)),
        # threads and signals to the process itself
        *(("futex", 202), ("set_tid_address", 218), ("set_robust_list", 273)),
        *(("rseq", 334), ("membarrier", 324), ("exit", 60)),
        *(("sched_yield", 24), ("sched_getaffinity", 204), ("sched_getparam", 143)),
        *(("sched_getscheduler", 145), ("getcpu", 309)),
        *(("sched_get_priority_max", 146), ("sched_get_priority_min", 147)),
        *(("exit_group", 231), ("restart_syscall", 219)),
        *(("rt_sigaction", 13), ("rt_sigprocmask", 14), ("rt_sigreturn", 15), ("sigaltstack", 131)),
        # clocks, and what the process is
        *(("nanosleep", 35), ("clock_nanosleep", 230), ("clock_gettime", 228)),
        *(("clock_getres", 229), ("gettimeofday", 96)),
        *(("time", 201), ("times", 100), ("getrusage", 98), ("getrlimit", 97)),
        *(("sysinfo", 99), ("uname", 63), ("getrandom", 318)),
        *(("getpid", 39), ("getppid", 110), ("gettid", 186), ("getuid", 102)),
        *(("geteuid", 107), ("getgid", 104), ("getegid", 108)),
    )
)

MISSING: Mapping[str, Numbers] = {
    # Their flags are in memory, which a filter cannot read. Without them, callers use clone and openat.
    "clone3": Numbers(435, 435),
    "openat2": Numbers(437, 437),
}

DENIED: Mapping[str, Numbers] = {
    name: Numbers(*numbers)
    for name, *numbers in (
        # sockets
        *(("socket", 41, 198), ("socketpair", 53, 199), ("connect", 42, 203), ("bind", 49, 200)),
        *(("listen", 50, 201), ("accept", 43, 202), ("accept4", 288, 242)),
        # programs and processes
        *(("fork", 57, None), ("vfork", 58, None), ("execve", 59, 221), ("execveat", 322, 281)),
        *(("ptrace", 101, 117), ("process_vm_readv", 310, 270), ("process_vm_writev", 311, 271)),
        *(("process_madvise", 440, 440), ("pidfd_open", 434, 434), ("pidfd_getfd", 438, 438), ("kcmp", 312, 272)),
        # signals
        *(("kill", 62, 129), ("tkill", 200, 130), ("tgkill", 234, 131), ("pidfd_send_signal", 424, 424)),
        *(("rt_sigqueueinfo", 129, 138), ("rt_tgsigqueueinfo", 297, 240)),
        # priorities and limits
        *(("setpriority", 141, 140), ("ioprio_set", 251, 30), ("sched_setparam", 142, 118)),
        *(("sched_setscheduler", 144, 119), ("sched_setattr", 314, 274), ("sched_setaffinity", 203, 122)),
        *(("migrate_pages", 256, 238), ("move_pages", 279, 239), ("setrlimit", 160, 164)),
        # metadata of files
        *(("chmod", 90, None), ("fchmod", 91, 52), ("fchmodat", 268, 53), ("fchmodat2", 452, 452)),
        *(("chown", 92, None), ("lchown", 94, None), ("fchown", 93, 55), ("fchownat", 260, 54)),
        *(("utime", 132, None), ("utimes", 235, None), ("futimesat", 261, None), ("utimensat", 280, 88)),
        *(("setxattr", 188, 5), ("lsetxattr", 189, 6), ("fsetxattr", 190, 7), ("setxattrat", 463, 463)),
        *(("removexattr", 197, 14), ("lremovexattr", 198, 15), ("fremovexattr", 199, 16)),
        *(("removexattrat", 466, 466), ("file_setattr", 469, 469)),
        # changes of files and folders; a file is opened for writing by open and openat, see below
        *(("creat", 85, None), ("truncate", 76, 45), ("open_by_handle_at", 304, 265)),
        *(("mkdir", 83, None), ("mkdirat", 258, 34), ("rmdir", 84, None), ("unlink", 87, None), ("unlinkat", 263, 35)),
        *(("rename", 82, None), ("renameat", 264, 38), ("renameat2", 316, 276), ("mknod", 133, None)),
        *(("mknodat", 259, 33), ("link", 86, None), ("linkat", 265, 37), ("symlink", 88, None), ("symlinkat", 266, 36)),
        # objects that outlive the process: System V's and POSIX's interprocess communication
        *(("shmget", 29, 194), ("shmat", 30, 196), ("shmctl", 31, 195), ("shmdt", 67, 197)),
        *(("semget", 64, 190), ("semop", 65, 193), ("semctl", 66, 191), ("semtimedop", 220, 192)),
        *(("msgget", 68, 186), ("msgsnd", 69, 189), ("msgrcv", 70, 188), ("msgctl", 71, 187)),
        *(("mq_open", 240, 180), ("mq_unlink", 241, 181), ("mq_timedsend", 242, 182), ("mq_timedreceive", 243, 183)),
        *(("mq_notify", 244, 184), ("mq_getsetattr", 245, 185)),
        # memory that is not limited as private memory is; mmap is below
        *(("memfd_create", 319, 279), ("memfd_secret", 447, 447)),
        # interfaces of the kernel with many bugs, and those of an administrator
        *(("io_uring_setup", 425, 425), ("io_uring_enter", 426, 426), ("io_uring_register", 427, 427)),
        *(("bpf", 321, 280), ("perf_event_open", 298, 241), ("userfaultfd", 323, 282)),
        *(("add_key", 248, 217), ("request_key", 249, 218), ("keyctl", 250, 219)),
        *(("mount", 165, 40), ("umount2", 166, 39), ("pivot_root", 155, 41), ("chroot", 161, 51)),
        *(("open_tree", 428, 428), ("move_mount", 429, 429), ("fsopen", 430, 430), ("fsconfig", 431, 431)),
        *(("fsmount", 432, 432), ("fspick", 433, 433), ("mount_setattr", 442, 442)),
        *(("unshare", 272, 97), ("setns", 308, 268)),
    )
}

ARGUMENT_RULES: Mapping[str, ArgumentRule] = {
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC; not F_SETOWN, F_SETSIG, F_SETOWN_EX, with which the
    # kernel sends a signal to another process
    "fcntl": ArgumentRule(Numbers(72, 25), 1, (0, 1, 2, 3, 4, 1030), (8, 10, 15)),
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX; not FIOSETOWN, SIOCSPGRP, which are F_SETOWN, and
    # FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR, which change a file's metadata
    "ioctl": ArgumentRule(
        Numbers(16, 29),
        1,
        (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451),
        (0x8901, 0x8902, 0x40086602, 0x401C5820),
    ),
    # PR_SET_NAME, PR_GET_NAME; not PR_SET_PDEATHSIG, which ends a worker with its parent
    "prctl": ArgumentRule(Numbers(157, 167), 0, (15, 16), (1,)),
    # Limits of the process itself, which it cannot raise.
    "prlimit64": ArgumentRule(Numbers(302, 261), 0, (0,), None),
}

OPEN: Mapping[str, tuple[Numbers, int]] = {"open": (Numbers(2, None), 1), "openat": (Numbers(257, 56), 2)}
"""Calls that open a file, and the index of their flags."""
WRITE_FLAGS: int = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

CLONE: Numbers = Numbers(56, 220)
CLONE_THREAD: int = 0x10000
"""The flag with which clone starts a thread, not a process."""

MMAP: Numbers = Numbers(9, 222)
MAP_SHARED: int = 0x01
MAP_ANONYMOUS: int = 0x20
"""A mapping with both flags is denied: its memory is not limited as private memory is."""
