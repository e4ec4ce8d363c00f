"""The reader of video files that comes with this package; it imports its library on use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from .types import OpenVideo, Pixels, StopCheck, VideoInfo, VideoReader
from .video import stack, undecodable

if TYPE_CHECKING:
    from av.container import InputContainer

# FFmpeg opens what a file refers to, if it can: these are the only containers it may take the bytes for, and nothing
# else is opened.
_CONTAINED = {"format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts", "protocol_whitelist": "none"}


class PyAVReader:
    """PyAV: FFmpeg, maintained, and built for every platform."""

    name = "pyav"
    priority = 10

    def available(self) -> bool:
        return find_spec("av") is not None

    def open(self, data: bytes) -> OpenVideo:
        _check_container(data)
        return _PyAVVideo(data)


READERS: tuple[VideoReader, ...] = (PyAVReader(),)
"""Best first. decord is none of them: of damaged files, every few hundredth ends its process."""


class _PyAVVideo:
    def __init__(self, data: bytes) -> None:
        self._data = data
        with _opened(data) as container:
            self.info = _header(container)

    def frames(self, indices: list[int], check_stop: StopCheck) -> Pixels:
        with _opened(self._data) as container:
            container.streams.video[0].thread_type = "AUTO"
            found = stack(self._decoded(container, indices, check_stop), len(indices))
        if len(found) < len(indices):
            raise undecodable()
        return found

    def _decoded(self, container: InputContainer, indices: list[int], check_stop: StopCheck) -> Iterator[Pixels]:
        wanted = set(indices)
        for i, frame in zip(range(indices[-1] + 1), container.decode(video=0), strict=False):
            check_stop()
            if i in wanted:
                yield self._upright(frame)

    def _upright(self, frame: Any) -> Pixels:
        """A frame as shown; one that is not as large as the header said was not counted, and is refused."""
        if (frame.width, frame.height) != (self.info.width, self.info.height):
            raise undecodable()
        pixels: Pixels = frame.to_ndarray(format="rgb24")
        return np.rot90(pixels, frame.rotation // 90)


def _check_container(data: bytes) -> None:
    """Refuse what does not begin as MP4/QuickTime, Matroska/WebM, AVI or MPEG-TS files do.

    Decided before FFmpeg sees the bytes: it would also read playlists, which make it open the files and addresses they
    list.
    """
    mp4 = data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
    transport_stream = data[0:1] == b"G" and data[188:189] == b"G" and data[376:377] == b"G"
    avi = data[:4] == b"RIFF" and data[8:12] == b"AVI "
    if not (mp4 or transport_stream or avi or data[:4] == b"\x1a\x45\xdf\xa3"):
        raise undecodable()


def _header(container: InputContainer) -> VideoInfo:
    """What the container says, without decoding: where it counts no frames, its packets are counted."""
    stream = container.streams.video[0] if container.streams.video else None
    if stream is None or stream.codec_context is None:  # the second where FFmpeg knows no such codec
        raise undecodable()
    return VideoInfo(
        frames=stream.frames or sum(packet.size > 0 for packet in container.demux(stream)),
        fps=float(stream.average_rate or 0),
        width=stream.codec_context.width,
        height=stream.codec_context.height,
    )


@contextmanager
def _opened(data: bytes) -> Iterator[InputContainer]:
    import av

    try:
        with av.open(BytesIO(data), "r", container_options=_CONTAINED) as container:
            yield container
    except (av.FFmpegError, ValueError) as error:
        raise undecodable() from error
