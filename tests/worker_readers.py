"""A video reader that does what a hostile file could make a decoder do; media workers import it by its name."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import numpy as np

from dashinfer_vlm_core.media import VideoInfo


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


def is_denied(action):
    try:
        action()
    except PermissionError:
        return True
    return False


def write_file():
    Path("/tmp/written-by-a-media-worker").write_bytes(b"x")


FORBIDDEN = {
    "socket": lambda: socket.socket().close(),
    "run": lambda: subprocess.run(["true"], check=True),
    "fork": lambda: os.fork() or os._exit(0),
    "kill": lambda: os.kill(os.getppid(), signal.SIGCONT),
    "write": write_file,
    "read": lambda: Path("/etc/passwd").read_bytes(),
    "list": lambda: list(Path("/proc").iterdir()),
    "make a folder": lambda: Path("/tmp/made-by-a-media-worker").mkdir(),
}


def forbidden():
    """Return a frame per forbidden action: 1 if it was denied, 255 if not."""
    return Frames([1 if is_denied(action) else 255 for action in FORBIDDEN.values()])


ACTIONS = {
    action.__name__.encode(): action
    for action in (sleep, crash, leave, allocate, warn, environment, remember, forbidden)
}


class ActionReader:
    name, priority = "action", 99

    def available(self):
        return True

    def open(self, data):
        return ACTIONS[data]()
