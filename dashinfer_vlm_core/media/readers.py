"""The built-in video reader; it imports PyAV on first use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from .types import OpenVideo, Pixels, StopCheck, VideoInfo, VideoReader
from .video import stack, undecodable_error

if TYPE_CHECKING:
    from av.container import InputContainer

# FFmpeg opens other files that a file refers to. These options allow only these container formats, and no protocol to
# open anything else.
_CONTAINER_OPTIONS = {
    "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts",
    "protocol_whitelist": "none",
}


class PyAVReader:
    """Video reader that uses PyAV, Python bindings of FFmpeg."""

    name = "pyav"
    priority = 10

    def available(self) -> bool:
        return find_spec("av") is not None

    def open(self, data: bytes) -> OpenVideo:
        _check_container(data)
        return _PyAVVideo(data)


READERS: tuple[VideoReader, ...] = (PyAVReader(),)
"""The built-in readers. decord is not one of them: about one in a few hundred damaged files crashes its process."""


class _PyAVVideo:
    def __init__(self, data: bytes) -> None:
        self._data = data
        with _open(data) as container:
            self.info = _read_header(container)

    def frames(self, indices: list[int], check_stop: StopCheck) -> Pixels:
        frames = stack(self.iterate(indices, check_stop), len(indices))
        if len(frames) < len(indices):
            raise undecodable_error()
        return frames

    def iterate(self, indices: list[int], check_stop: StopCheck) -> Iterator[Pixels]:
        with _open(self._data) as container:
            container.streams.video[0].thread_type = "AUTO"
            yield from self._decode(container, indices, check_stop)

    def _decode(self, container: InputContainer, indices: list[int], check_stop: StopCheck) -> Iterator[Pixels]:
        wanted = set(indices)
        for i, frame in zip(range(indices[-1] + 1), container.decode(video=0), strict=False):
            check_stop()
            if i in wanted:
                yield self._upright(frame)

    def _upright(self, frame: Any) -> Pixels:
        """Return a rotated frame; reject one whose size differs from the header's, on which the limits were checked."""
        if (frame.width, frame.height) != (self.info.width, self.info.height):
            raise undecodable_error()
        pixels: Pixels = frame.to_ndarray(format="rgb24")
        return np.rot90(pixels, frame.rotation // 90)


def _check_container(data: bytes) -> None:
    """Reject data without the signature of MP4/QuickTime, Matroska/WebM, AVI or MPEG-TS.

    This check comes before FFmpeg, which also reads playlists and opens the files and URLs that they list.
    """
    mp4 = data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
    transport_stream = data[0:1] == b"G" and data[188:189] == b"G" and data[376:377] == b"G"
    avi = data[:4] == b"RIFF" and data[8:12] == b"AVI "
    if not (mp4 or transport_stream or avi or data[:4] == b"\x1a\x45\xdf\xa3"):
        raise undecodable_error()


def _read_header(container: InputContainer) -> VideoInfo:
    """Read the container's header without decoding; count the packets if it has no frame count."""
    stream = container.streams.video[0] if container.streams.video else None
    if stream is None or stream.codec_context is None:  # no context if FFmpeg has no such codec
        raise undecodable_error()
    return VideoInfo(
        frames=stream.frames or sum(packet.size > 0 for packet in container.demux(stream)),
        fps=float(stream.average_rate or 0),
        width=stream.codec_context.width,
        height=stream.codec_context.height,
    )


@contextmanager
def _open(data: bytes) -> Iterator[InputContainer]:
    import av

    try:
        with av.open(BytesIO(data), "r", container_options=_CONTAINER_OPTIONS) as container:
            yield container
    except MemoryError:  # one class of PyAV's errors is also this one
        raise
    except (av.FFmpegError, ValueError) as error:
        raise undecodable_error() from error
