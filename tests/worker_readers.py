"""A video reader that does what a hostile file could make a decoder do; media workers import it by its name."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import resource
import signal
import socket
import subprocess
import time
from pathlib import Path

import numpy as np

from dashinfer_vlm_core.media import VideoInfo, VideoReader


class Frames:
    """Frames of the given values."""

    def __init__(self, values):
        self.values = values
        self.info = VideoInfo(frames=len(values), fps=2.0, width=28, height=28)

    def frames(self, indices, check_stop):
        return np.stack([np.full((28, 28, 3), self.values[index], np.uint8) for index in indices])


def sleep():
    time.sleep(3600)


def crash():
    os.abort()


def leave():
    os._exit(0)


def allocate():
    np.ones(2 << 30, np.uint8)


def warn():
    for number in range(1000):
        logging.getLogger("decoder").warning("tag %d is damaged", number)
    return Frames([7] * 4)


def environment():
    """Return whether a variable that looks like a secret is set."""
    return Frames([255 if any("SECRET" in name or "KEY" in name for name in os.environ) else 1] * 4)


_seen: list[int] = []


def remember():
    """Return how many files this process has decoded before."""
    _seen.append(1)
    return Frames([len(_seen)] * 4)


def reserve():
    """Return whether 1 GiB of address space can be reserved, in memory that cannot be written."""
    try:
        mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ).close()
    except OSError:
        return Frames([1] * 4)
    return Frames([255] * 4)


def is_denied(action):
    try:
        action()
    except PermissionError:
        return True
    except OSError:
        pass  # it fails for another reason
    return False


def call(name, *arguments):
    """Call a function of libc that has no equivalent in Python."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


SCRATCH = Path(f"/tmp/made-by-a-media-worker-{os.getuid()}")


def write_file():
    SCRATCH.write_bytes(b"x")
    SCRATCH.unlink()


def make_folder():
    SCRATCH.mkdir()
    SCRATCH.rmdir()


NOWHERE = "/nowhere"
NO_PROCESS = 2**22  # process ids are smaller
FORBIDDEN = {
    "socket": lambda: socket.socket().close(),
    "run": lambda: subprocess.run(["true"], check=True),
    "fork": lambda: os.fork() or os._exit(0),
    "kill": lambda: os.kill(os.getppid(), signal.SIGCONT),
    "write": write_file,
    "make a folder": make_folder,
    "truncate": lambda: os.truncate(NOWHERE, 0),
    "mode": lambda: Path(NOWHERE).chmod(0o644),
    "owner": lambda: os.chown(NOWHERE, 0, 0),
    "time": lambda: os.utime(NOWHERE),
    "attribute": lambda: os.setxattr(NOWHERE, "user.a", b"b"),
    "limits of another process": lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CORE),
    "priority of another process": lambda: os.setpriority(os.PRIO_PROCESS, NO_PROCESS, 1),
    "processors of another process": lambda: os.sched_setaffinity(NO_PROCESS, [0]),
    "owner of signals": lambda: fcntl.fcntl(0, fcntl.F_SETOWN, 0),
    "kind of signal": lambda: fcntl.fcntl(0, fcntl.F_SETSIG, 0),
    "life beyond the parent": lambda: call("prctl", 1, 0, 0, 0, 0),
    "System V memory": lambda: call("shmget", 0, 0, 0),
    "System V messages": lambda: call("msgget", 1, 0),
    "shared memory": lambda: mmap.mmap(-1, 4096).close(),
    "memory file": lambda: os.close(os.memfd_create("memory")),
    "root folder": lambda: os.chroot(NOWHERE),
}
"""What is denied with the seccomp filter alone."""
FORBIDDEN_FILES = {
    "read": lambda: Path("/etc/passwd").read_bytes(),
    "list": lambda: list(Path("/proc").iterdir()),
    "read the repository": (Path(__file__).parents[1] / "pyproject.toml").read_bytes,
}
"""What Landlock denies."""


def allowed_actions():
    """Return the names of the forbidden actions that are not denied."""
    return [name for name, action in {**FORBIDDEN, **FORBIDDEN_FILES}.items() if not is_denied(action)]


def forbidden():
    """Return frames that say how many forbidden actions are not denied."""
    return Frames([len(allowed_actions())] * 4)


ACTIONS = {
    action.__name__.encode(): action
    for action in (sleep, crash, leave, allocate, warn, environment, remember, reserve, forbidden)
}


class ActionReader(VideoReader):
    name, priority = "action", 99

    def available(self):
        return True

    def open(self, data):
        return ACTIONS[data]()
