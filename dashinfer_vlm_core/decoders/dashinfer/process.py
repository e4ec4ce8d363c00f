"""The parent's side of a worker process: start it, talk to it, hear that it died, and leave nothing of it behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

import anyio

from . import worker
from .environment import PROGRAM, Environment

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

logger: logging.Logger = logging.getLogger(__name__)

LINGER_SECONDS = 1.0
"""How long a worker may take from closing its socket to its end."""
LAST_LINES = 5
LOG_MARK = " | "
"""Between what is known of a death, and the last lines of the worker's log."""


class WorkerDied(Exception):
    """The worker's process ended, or never became ready; the text says what is known."""


class WorkerProcess:
    """A worker that is ready. Belongs to the event loop that launched it.

    The two talk over a pair of connected Unix sockets, one of which the worker inherits: nothing is on disk, and nobody
    else can reach it.

    Attributes:
        pid: of its process.
        version: the engine's.
    """

    def __init__(self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid: int = process.pid
        self.version = ""
        self._process = process
        self._reader = reader
        self._writer = writer
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._log = asyncio.create_task(self._pass_log_on(), name="dashinfer-log")

    @classmethod
    async def launch(cls, environment: Environment, model: dict[str, Any]) -> WorkerProcess:
        """Start a worker and let it load; `model` holds the arguments of DashInfer's AsModelConfig.

        Raises:
            WorkerDied: it ended before it was ready.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *environment.command(PROGRAM, "serve", str(theirs.fileno())),
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C in a terminal is for us: we close it in order
                )
            except OSError as error:
                ours.close()
                raise WorkerDied(f"{environment.python} cannot be run: {error.strerror}") from error
        self = cls(process, *await asyncio.open_connection(sock=ours))
        try:
            libraries = str(environment.stubs) if environment.stubs else None
            self.send({"do": "load", "model": model, "libraries": libraries})
            self.version = (await self._receive())["version"]
        except BaseException:
            await self.close()
            raise
        return self

    def send(self, head: dict[str, Any], arrays: Sequence[npt.NDArray[np.generic]] = ()) -> None:
        """Hand a frame over; what a dead worker is sent is lost, and `frames` says that it is dead."""
        if not self._writer.is_closing():
            self._writer.writelines(worker.pack(head, arrays))

    async def frames(self) -> AsyncGenerator[dict[str, Any], None]:
        """What the worker sends.

        Raises:
            WorkerDied: it ended.
        """
        while True:
            yield await self._receive()

    def kill(self) -> None:
        """End it; `frames` says so. A worker holds nothing that it would have to put in order."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """Kill it and wait until it is gone."""
        self.kill()
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        await self._process.wait()
        await self._log
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(OSError):
            await self._process.stdin.wait_closed()

    async def _receive(self) -> dict[str, Any]:
        try:
            length = worker.head_length(await self._reader.readexactly(worker.HEAD.size))
            head: dict[str, Any] = json.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            raise WorkerDied(await self._exit_error()) from None
        return head

    async def _exit_error(self) -> str:
        # Not killed at once: to signal a process that has just ended takes its exit status away from whoever waits.
        with anyio.move_on_after(LINGER_SECONDS):
            await self._process.wait()
        if self._process.returncode is None:  # it has closed its socket only
            self.kill()
        status = await self._process.wait()
        await self._log
        how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        return LOG_MARK.join([how, *self._last_lines])

    async def _pass_log_on(self) -> None:
        """The worker's output -> our log, for debugging, fatal lines aside: DashInfer calls harmless things errors."""
        assert self._process.stdout is not None
        async for raw in _lines(self._process.stdout):
            line = raw.decode(errors="replace").rstrip()
            if not line.strip("."):
                continue
            self._last_lines.append(line)
            logger.log(logging.WARNING if line.startswith("F") else logging.DEBUG, "worker %d: %s", self.pid, line)


async def _lines(stream: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
    """Lines, where those that are longer than the stream's limit come in pieces."""
    while True:
        try:
            line = await stream.readline()
        except ValueError:
            continue
        if not line:
            return
        yield line
