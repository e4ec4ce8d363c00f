"""How far the images and videos of a streamed request are encoded, for comments in its stream."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from dashinfer_vlm_core.engine.observers import RequestObserver


@dataclass(slots=True)
class StreamProgress:
    """The progress of one request.

    Attributes:
        comment: what to send while there is no token; empty until an image or a pair of frames was encoded.
    """

    comment: str = ""


_CURRENT: ContextVar[StreamProgress | None] = ContextVar("stream_progress", default=None)


def follow_progress() -> StreamProgress:
    """Return the progress of what the caller requests from the engine from now on."""
    progress = StreamProgress()
    _CURRENT.set(progress)
    return progress


class ProgressObserver(RequestObserver):
    """Updates the progress of the request in whose context it is called."""

    def units_encoded(self, done: int, total: int) -> None:
        if progress := _CURRENT.get():
            progress.comment = f"vision {done}/{total}"
