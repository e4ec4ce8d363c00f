"""ForkServer: starts media workers for this process, and ends them."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from .wire import Disconnected, Started, receive_head

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]);"
    " from dashinfer_vlm_core.media_workers.worker_process import main; main(int(sys.argv[1]))"
)
_VARIABLES = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "TMPDIR")
"""What the fork server inherits. API keys and other secrets are in other variables."""
START_SECONDS = 60.0
"""How long the process may take to respond: it imports the decoders, perhaps from a slow disk."""
_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""A library that starts threads when it is imported would break forking."""


class ForkServer:
    """One process per process, started on first use, whose children are the media workers of all engines.

    The methods may be called from any thread. If the process has ended, the next `fork` starts another.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ids = itertools.count(1)
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget)

    def prepare(self, setup: Mapping[str, Any]) -> None:
        """Start the process, and load what workers need: this takes a second, which the first image need not wait for.

        Args:
            setup: as in `fork`.
        """
        self._request({"prepare": setup}, [])

    def test_sandbox(self, readers: Sequence[Sequence[str]]) -> str:
        """Test whether files are decoded in the sandbox; return the warning if it has to be less strict.

        Args:
            readers: the references of video readers.

        Raises:
            OSError: the process cannot be started, or there is no response.
        """
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._request({"test": readers}, [theirs.fileno()])
            theirs.close()
            ours.settimeout(START_SECONDS)
            try:
                return Started.model_validate_json(receive_head(ours)).warning
            except Disconnected:
                raise OSError("the process that decodes media ended") from None

    def fork(self, setup: Mapping[str, Any], memory: int) -> tuple[int, socket.socket]:
        """Start a worker; return its id and this process's end of its socket.

        Args:
            setup: what the worker loads; JSON.
            memory: the descriptor of its shared memory.

        Raises:
            OSError: the process cannot be started.
        """
        ours, theirs = socket.socketpair()
        worker = next(self._ids)
        try:
            with theirs:
                self._request({"fork": worker, "setup": setup}, [theirs.fileno(), memory])
        except BaseException:
            ours.close()
            raise
        return worker, ours

    def kill(self, worker: int) -> None:
        self._send({"kill": worker})

    def lower_priority(self, worker: int) -> None:
        self._send({"lower_priority": worker})

    def close(self) -> None:
        """End the process and all workers."""
        with self._lock:
            self._close()

    def _request(self, message: Mapping[str, Any], files: Sequence[int]) -> None:
        packet = json.dumps(message).encode()
        with self._lock:
            if self._control is not None:
                with contextlib.suppress(OSError):  # it has ended
                    socket.send_fds(self._control, [packet], files)
                    return
            socket.send_fds(self._start(), [packet], files)

    def _send(self, message: Mapping[str, Any]) -> None:
        with self._lock, contextlib.suppress(OSError):  # if it has ended, its workers have too
            if self._control is not None:
                self._control.send(json.dumps(message).encode())

    def _start(self) -> socket.socket:
        self._close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        with theirs:
            try:
                self._process = subprocess.Popen(  # noqa: S603  our own interpreter and program
                    [sys.executable, "-I", "-c", _PROGRAM, str(theirs.fileno()), json.dumps(sys.path)],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    # Each arena of the allocator keeps memory that its threads have freed.
                    env={**environment, **_THREADS, "MALLOC_ARENA_MAX": "2"},
                )
            except BaseException:
                ours.close()
                raise
        self._control = ours
        return ours

    def _close(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()  # the kernel then kills its children
            self._process.wait()
        self._control = self._process = None

    def _forget(self) -> None:
        self._lock = threading.Lock()
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.returncode = 0  # otherwise, its finalizer warns about a process that still runs
        self._control = self._process = None


FORK_SERVER: ForkServer = ForkServer()
