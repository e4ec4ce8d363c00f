"""The parent's side of a worker process: start it, exchange frames with it, detect its death, and clean up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import anyio

from . import worker
from .environment import PROGRAM, Environment, inherited_variables

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

logger: logging.Logger = logging.getLogger(__name__)

EXIT_SECONDS = 1.0
"""How long a worker may take to exit after it closed its socket."""
MAX_LOG_LINES = 5
MAX_LINE_BYTES = 1 << 26


class WorkerDied(Exception):
    """The worker's process ended, or never became ready; the message is its exit status."""


class WorkerProcess:
    """A worker process that is ready. Belongs to the event loop that launched it.

    The processes communicate over a pair of connected Unix sockets, one of which the worker inherits. There is no file
    on disk, and no other process can connect.

    Attributes:
        pid: its process id.
        version: DashInfer's version.
    """

    def __init__(self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid: int = process.pid
        self.version = ""
        self._process = process
        self._reader = reader
        self._writer = writer
        self._log_lines: deque[str] = deque(maxlen=MAX_LOG_LINES)
        self._log = asyncio.create_task(self._forward_log(), name="dashinfer-log")

    @classmethod
    async def launch(cls, environment: Environment, model: dict[str, Any]) -> WorkerProcess:
        """Start a worker and load the model; `model` contains the arguments of DashInfer's AsModelConfig.

        Raises:
            WorkerDied: it ended before it was ready.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *environment.command(PROGRAM, "serve", str(theirs.fileno())),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    env=inherited_variables(),
                    limit=MAX_LINE_BYTES,
                    start_new_session=True,  # Ctrl-C in a terminal must not reach it: the parent closes it
                )
            except OSError as error:
                ours.close()
                raise WorkerDied(f"{environment.python} cannot be run: {error.strerror}") from error
        self = cls(process, *await asyncio.open_connection(sock=ours))
        try:
            self.send({"do": "load", "model": model})
            self.version = (await self.receive())["version"]
        except BaseException:
            await self.close()
            raise
        return self

    def send(self, head: dict[str, Any], arrays: Sequence[npt.NDArray[np.generic]] = ()) -> None:
        """Send a frame. A frame to a dead worker is lost, and `receive` raises WorkerDied."""
        if not self._writer.is_closing():
            self._writer.writelines(worker.pack(head, arrays))

    async def receive(self) -> dict[str, Any]:
        """Wait for the next frame that the worker sends.

        Raises:
            WorkerDied: it ended.
        """
        try:
            length = worker.head_length(await self._reader.readexactly(worker.HEAD.size))
            head: dict[str, Any] = json.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            raise WorkerDied(await self._exit_error()) from None
        return head

    def kill(self) -> None:
        """Kill it; `receive` then raises WorkerDied. A worker has nothing to clean up."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """Kill it and wait until it has ended."""
        self.kill()
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        await self._process.wait()
        await self._log

    async def _exit_error(self) -> str:
        # Not killed at once: a signal to a process that has just ended would hide its exit status.
        with anyio.move_on_after(EXIT_SECONDS):
            await self._process.wait()
        if self._process.returncode is None:  # it only closed its socket
            self.kill()
        status = await self._process.wait()
        await self._log
        logger.warning("DashInfer's worker %d has ended. Its last output: %s", self.pid, " | ".join(self._log_lines))
        return f"killed by signal {-status}" if status < 0 else f"exit status {status}"

    async def _forward_log(self) -> None:
        # Fatal lines are warnings; DashInfer reports harmless events as errors.
        assert self._process.stdout is not None
        async for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip()
            if not line.strip("."):
                continue
            self._log_lines.append(line)
            logger.log(logging.WARNING if line.startswith("F") else logging.DEBUG, "worker %d: %s", self.pid, line)
