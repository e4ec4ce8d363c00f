"""Messages between the engine and a media worker. They are JSON and bytes; nothing is unpickled.

A message is: uint32 (little endian), the length of the head; the head, a model of this module as JSON in UTF-8; then
the bytes that the head announces. The worker sends `Started` once, and then a `WorkerResponse` for each `JobRequest`.
Responses are validated: a hostile file may have taken over the worker that sends them.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, StringConstraints

from ..errors import InvalidParameter, MediaTooLarge, MediaUndecodable
from ..media.documents import MAX_POINTS
from ..media.types import TokenCount
from ..protocol import DocumentPart, MediaPart

LENGTH = struct.Struct("<I")
MAX_HEAD_BYTES = 1 << 20
MAX_SIDE = 1 << 30
SMALL_BYTES = 1 << 18
"""Files up to this size in total are copied, to be sent with the head."""

_Line = Annotated[str, StringConstraints(max_length=2000, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$")]
_Traceback = Annotated[str, Field(max_length=10_000)]
_Points = Annotated[float, Field(gt=0, le=MAX_POINTS, allow_inf_nan=False)]
_Side = Annotated[PositiveInt, Field(le=MAX_SIDE)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_FramesPerSecond = Annotated[float, Field(ge=1e-9, allow_inf_nan=False)]

_ERRORS = {kind.__name__: kind for kind in (InvalidParameter, MediaTooLarge, MediaUndecodable)}


class Disconnected(Exception):
    """The other end was closed."""


class _Message(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid", frozen=True)


class JobRequest(_Message):
    """One image or video to process, or a document to read; its files follow.

    Attributes:
        part: the part, whose sources only show how many files it has.
        sizes: bytes of each file.
        max_tokens: an item with more visual tokens is not processed.
    """

    part: Annotated[MediaPart | DocumentPart, Field(discriminator="kind")]
    sizes: tuple[int, ...]
    max_tokens: TokenCount


class ErrorResponse(_Message):
    """The request is invalid."""

    type: Literal["InvalidParameter", "MediaTooLarge", "MediaUndecodable"]
    message: _Line
    param: _Line
    code: _Line | None

    @classmethod
    def of(cls, error: InvalidParameter | MediaTooLarge | MediaUndecodable) -> ErrorResponse:
        return cls.model_validate(
            {"type": type(error).__name__, "message": error.message, "param": error.param, "code": error.code}
        )

    def restore(self, path: str) -> InvalidParameter | MediaTooLarge | MediaUndecodable:
        """Return the exception.

        Args:
            path: the part's path in the request, which its `param` must begin with.

        Raises:
            ValueError: it names another part.
        """
        if not self.param.startswith(path):
            raise ValueError("the error names another part")
        return _ERRORS[self.type](self.message, param=self.param, code=self.code)


class PatchesResponse(_Message):
    """The item was processed; its pixels are in the shared memory."""

    grid: tuple[_Side, _Side, _Side]
    times: tuple[_Seconds, ...]
    sampled_fps: _FramesPerSecond | None
    source_size: tuple[_Side, _Side]


class PageResponse(_Message):
    """A page of a document; the texts of all pages, one after the other in UTF-8, are in the shared memory."""

    number: Annotated[PositiveInt, Field(le=MAX_SIDE)]
    width: _Points
    height: _Points
    text_bytes: Annotated[NonNegativeInt, Field(le=MAX_SIDE)]
    error: ErrorResponse | None = None

    def restore_error(self, path: str) -> InvalidParameter | MediaTooLarge | MediaUndecodable | None:
        """Return the exception, as `ErrorResponse.restore`, if the page cannot be read."""
        return None if self.error is None else self.error.restore(path)


class WorkerResponse(_Message):
    """The response to a job: one of the fields, and the worker's warnings.

    Attributes:
        error: the request is invalid.
        patches: the item was processed.
        pages: the document was read.
        tokens: the item has this many visual tokens, which the job does not allow.
        exception: the traceback of an unexpected exception.
        logs: warnings of the decoder.
    """

    error: ErrorResponse | None = None
    patches: PatchesResponse | None = None
    pages: tuple[PageResponse, ...] | None = None
    tokens: PositiveInt | None = None
    exception: _Traceback | None = None
    logs: Annotated[tuple[_Line, ...], Field(max_length=10)] = ()


class Started(_Message):
    """The first message of a worker: its process id, or why it cannot be set up.

    Attributes:
        ready: its process id.
        warning: how its sandbox is less strict than it should be, if it is.
        failed: why it cannot be set up.
    """

    ready: PositiveInt | None = None
    warning: _Line = ""
    failed: _Traceback = ""


def send(sock: socket.socket, head: BaseModel, data: Sequence[bytes] = (), *, end: float | None = None) -> None:
    """Send a message.

    Args:
        sock: the socket.
        head: the head.
        data: what follows it.
        end: a time of `time.monotonic`, until which all of it must be sent; None means the socket's own timeout.

    Raises:
        TimeoutError: it took longer.
    """
    body = head.model_dump_json().encode()
    message = LENGTH.pack(len(body)) + body
    if sum(map(len, data)) <= SMALL_BYTES:
        message = b"".join([message, *data])  # wakes the other end once
        data = ()
    for item in (message, *data):
        _set_timeout(sock, end)
        sock.sendall(item)


def receive_head(sock: socket.socket, *, end: float | None = None) -> bytes:
    """Receive the JSON text of a head, which is not checked.

    Args:
        sock: the socket.
        end: as in `send`.

    Raises:
        Disconnected: the other end was closed.
        TimeoutError: it took longer.
        ValueError: it is too long.
    """
    (length,) = LENGTH.unpack(receive(sock, LENGTH.size, end=end))
    if length > MAX_HEAD_BYTES:
        raise ValueError("the head is too long")
    return receive(sock, length, end=end)


def receive(sock: socket.socket, size: int, *, end: float | None = None) -> bytes:
    """Receive exactly `size` bytes.

    Args:
        sock: the socket.
        size: the number of bytes.
        end: as in `send`.

    Raises:
        Disconnected: the other end was closed.
        TimeoutError: it took longer.
    """
    pieces = []
    while size:
        _set_timeout(sock, end)
        data = sock.recv(size, socket.MSG_WAITALL)  # a socket with a timeout does not wait for all
        if not data:
            raise Disconnected
        pieces.append(data)
        size -= len(data)
    return b"".join(pieces)


def _set_timeout(sock: socket.socket, end: float | None) -> None:
    """A timeout applies to each call: the other end could use it up for every byte."""
    if end is None:
        return
    seconds = end - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    sock.settimeout(seconds)
