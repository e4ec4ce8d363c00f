"""MediaWorker: the engine's end of one worker process."""

from __future__ import annotations

import contextlib
import itertools
import logging
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from ..errors import EngineClosed, EngineError, MediaUndecodable
from ..media.documents import Document, Page
from ..media.image import deadline_error
from ..media.types import Grid, TokenCount
from ..models.interface import ImageProcessor, Patches
from ..models.patches import least_tokens, reduced
from ..models.spec import PixelSpec
from ..protocol import DocumentPart, MediaPart
from . import wire
from .fork_server import FORK_SERVER, START_SECONDS
from .shared_memory import SharedMemory
from .threads import TokenBudget
from .wire import Disconnected, JobRequest, PageResponse, PatchesResponse, Started, WorkerResponse

MAX_CHARACTER_BYTES = 4
"""In UTF-8."""
PATIENCE_SECONDS = 1.0
"""How long a job runs at normal priority."""

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """How workers are started and their results are checked.

    Attributes:
        setup: what a worker loads; JSON.
        processor: equal to the one that the worker uses.
        pixels: the model's preprocessing parameters.
    """

    setup: Mapping[str, Any]
    processor: ImageProcessor
    pixels: PixelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One image or video to process, or a document to read.

    Attributes:
        part: the part.
        data: its encoded file, or one per frame of a list.
        budget: counts the visual tokens of the request; of a document, it limits the text.
        seconds: the time after which the worker is killed.
    """

    part: MediaPart | DocumentPart
    data: Sequence[bytes]
    budget: TokenBudget
    seconds: float


class MediaWorker:
    """One worker process. `run` is called from one thread at a time, `kill` from any.

    Args:
        config: how it is started.
        client: the id of the client whose files it decodes.

    Attributes:
        config, client: as above.
        reusable: whether it accepts another job.
        pid: its process id, once it has started.
        end: why it ended: `timed_out`, `crashed` or `canceled`; empty before, and for idle workers.
        lost_job: whether it ended before it had received all of its job, which therefore did not end it.
    """

    def __init__(self, config: WorkerConfig, client: str) -> None:
        self.config = config
        self.client = client
        self._lock = threading.Lock()
        self._memory: SharedMemory | None = None
        self._sock: socket.socket | None = None
        self._id = 0
        self._killed = False
        self.reusable: bool = True
        self.pid: int | None = None
        self.end: Literal["", "timed_out", "crashed", "canceled"] = ""
        self.lost_job: bool = False

    def start(self) -> None:
        """Start the process and wait until it accepts jobs.

        Raises:
            EngineError: the process could not be started.
            EngineClosed: `kill` was called.
        """
        if self._sock is not None or self._killed:
            return
        try:
            try:
                started = self._fork()
            except Disconnected:  # the fork server ended, perhaps because it had been idle: there is another now
                started = self._fork()
        except (Disconnected, OSError, ValueError) as error:
            if self._killed:
                raise EngineClosed("The request was canceled.") from None
            self.kill()
            raise _start_error(str(error)) from error
        if started.warning:
            _warn_once(started.warning)
        self.pid = started.ready
        if self.pid is None:
            self.kill()
            raise _start_error(started.failed)

    def run(self, job: Job) -> Patches | Document:
        """Process one item, and block until it is complete.

        Raises:
            MediaTooLarge: it needs more time or memory than is allowed, or exceeds another limit.
            MediaUndecodable: it is damaged, or the worker crashed.
            InvalidParameter: an option of the part does not apply to it.
            ContextLengthExceeded: the request has more visual tokens than its budget.
            EngineClosed: `kill` was called.
            EngineError: a worker could not be started, or failed in another way.
        """
        self.start()
        try:
            return self._run(job)
        except TimeoutError:
            self.kill()
            self.end = "timed_out"
            raise deadline_error(job.part.subject, job.part.path, job.seconds) from None
        except (Disconnected, ConnectionError, ValueError) as error:
            if self._killed:
                self.end = "canceled"
                raise EngineClosed("The request was canceled.") from None
            self.kill()
            self.end = "crashed"
            # Unlike a worker that has received all, one that leaves data unread breaks or resets the connection.
            self.lost_job = isinstance(error, ConnectionError)
            logger.warning("%s: its media worker ended unexpectedly.", job.part.path)
            raise MediaUndecodable(
                f"The process that decodes the {job.part.subject} ended unexpectedly. The file may be damaged, or"
                " need too much memory: save it again.",
                param=job.part.path,
            ) from error

    @property
    def alive(self) -> bool:
        """Whether the process has not ended, as far as its socket shows."""
        if self._sock is None:
            return not self._killed
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not self._killed and not poll.poll(0)  # an idle worker sends nothing

    def kill(self) -> None:
        """End the process at once; a running job raises EngineClosed."""
        with self._lock:
            self._killed = True
            self.reusable = False
            if self._sock is None:
                return
            FORK_SERVER.kill(self._id)
            with contextlib.suppress(OSError):  # it has ended
                self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Kill the process and close the socket. No job is running."""
        self.kill()
        if self._sock is not None:
            self._sock.close()
        if self._memory is not None:
            self._memory.close()

    def _fork(self) -> Started:
        with self._lock:
            if self._killed:
                raise Disconnected
            if self._sock is not None:
                self._sock.close()
            self._memory = self._memory or SharedMemory.create()
            self._id, self._sock = FORK_SERVER.fork(self.config.setup, self._memory.file)
            self._sock.settimeout(START_SECONDS)
        return Started.model_validate_json(wire.receive_head(self._sock))

    def _run(self, job: Job) -> Patches | Document:
        max_tokens = job.budget.remaining
        if self._sock is None:
            raise Disconnected
        sock = self._sock
        end = time.monotonic() + job.seconds
        sizes = tuple(map(len, job.data))
        request = JobRequest(part=_without_sources(job.part), sizes=sizes, max_tokens=max_tokens)
        wire.send(sock, request, job.data, end=end)
        self._wait(sock, end)
        return self._result(WorkerResponse.model_validate_json(wire.receive_head(sock, end=end)), job, max_tokens)

    def _wait(self, sock: socket.socket, end: float) -> None:
        """Wait for the response. A long job goes on at low priority, so that short ones are not delayed."""
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        if poll.poll(1000 * min(PATIENCE_SECONDS, max(0.0, end - time.monotonic()))):
            return
        FORK_SERVER.lower_priority(self._id)
        self.reusable = False  # only a privileged process can raise the priority again
        if not poll.poll(1000 * max(0.0, end - time.monotonic())):
            raise TimeoutError

    def _result(self, response: WorkerResponse, job: Job, max_tokens: TokenCount) -> Patches | Document:
        for text in response.logs:
            logger.warning("%s: %s", job.part.path, text)
        if response.error is not None:
            raise response.error.restore(job.part.path)
        if response.exception is not None:
            logger.error("A media worker failed:\n%s", _indent(response.exception))
            raise EngineError(
                "The engine failed on this request; see its log for the cause. Other requests are not affected.",
                code="internal_error",
            )
        if isinstance(job.part, DocumentPart) and response.pages:
            return self._document(response.pages, job)
        if response.patches is not None and isinstance(job.part, MediaPart):
            patches = self._patches(response.patches, job.part, max_tokens)
            job.budget.add(patches.token_count)
            return patches
        if response.tokens is not None and isinstance(job.part, MediaPart):
            job.budget.check(least_tokens(response.tokens, job.part))
        raise ValueError("the response is empty")

    def _patches(self, response: PatchesResponse, part: MediaPart, max_tokens: TokenCount) -> Patches:
        assert self._memory is not None
        grid = Grid(*response.grid)
        spec = self.config.pixels
        values = 3 * spec.temporal_patch_size * spec.patch_size**2
        tokens = self.config.processor.shape(grid).tokens
        if least_tokens(tokens, part).exceeds(max_tokens) or (part.kind == "image" and grid.t != 1):
            raise ValueError("the item has too many tokens")
        return reduced(
            Patches(
                pixels=self._memory.read((grid.patches, values)),
                grid=grid,
                tokens=tokens,
                kind=part.kind,
                path=part.path,
                times=response.times,
                sampled_fps=response.sampled_fps,
                source_size=response.source_size,
            ),
            part,
        )

    def _document(self, pages: Sequence[PageResponse], job: Job) -> Document:
        assert self._memory is not None
        ends = list(itertools.accumulate(page.text_bytes for page in pages))
        if ends[-1] > MAX_CHARACTER_BYTES * job.budget.remaining.kept:
            raise ValueError("the pages have too much text")
        text = self._memory.read((ends[-1],)).tobytes() if ends[-1] else b""
        read = [
            Page(
                number=page.number,
                width=page.width,
                height=page.height,
                text=text[end - page.text_bytes : end].decode(),
                error=page.restore_error(job.part.path),
            )
            for page, end in zip(pages, ends, strict=True)
        ]
        return Document(file=job.data[0], pages=tuple(read))


@cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def _indent(text: str) -> str:
    """Indent a traceback and escape its control characters, so that no line of it looks like one of the log."""
    lines = ("".join(map(_escape, line)) for line in text.split("\n"))
    return "\n".join(f"    {line}" for line in lines)


def _escape(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _without_sources(part: MediaPart | DocumentPart) -> MediaPart | DocumentPart:
    if isinstance(part, DocumentPart):
        return replace(part, url="")
    # Decoding depends on whether the source is a list, and on its length.
    url = ("",) * len(part.url) if isinstance(part.url, tuple) else ""
    page = part.page and replace(part.page, file=b"")
    return replace(part, url=url, uuid=None, page=page)


def _start_error(reason: str) -> EngineError:
    logger.error("A media worker could not be started:\n%s", _indent(reason or "It ended at once."))
    return EngineError(
        "The process that decodes media could not be started; see the engine's log for the cause.",
        code="internal_error",
    )
