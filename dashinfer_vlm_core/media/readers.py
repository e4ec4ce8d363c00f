"""The built-in video readers; they import their libraries on first use."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from .entry_points import DecodedRange, RangeDecoder, find_entry_points, may_change_parameters, ranges_to_decode
from .types import OpenVideo, Pixels, StopCheck, VideoInfo, VideoReader
from .video import MAX_FPS, undecodable_error

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

CODECS = (
    *("h264", "hevc", "vp8", "vp9", "libdav1d", "av1"),
    *("mpeg1video", "mpeg2video", "mpeg4", "h263", "mjpeg", "prores"),
)
"""FFmpeg's names of the decoders that are used. It has more than 200 others, for files that nearly nobody has."""

# FFmpeg opens other files that a file refers to. These options allow only these container formats, these decoders while
# it opens a file, and no protocol to open anything else.
_CONTAINER_OPTIONS = {
    "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts",
    "codec_whitelist": ",".join(CODECS),
    "protocol_whitelist": "none",
}
_MP4_TYPES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")

_COUNTED_BOXES = (b"moof", b"elst", b"cmvd")
"""Boxes of MP4 files: fragments, an edit list, and a compressed header, which may have one. The number of frames in the
header leaves out the frames of fragments, and includes those that an edit list leaves out."""

MIN_SPACING = 16
"""Mean distance of needed frames, in frames, from which on those between them are not decoded if possible."""

_DECORD_THREADS = 2
"""With three or more threads, decord cannot decode many VP9 files."""
_FAULT_TOLERANCE = 1e-9
"""Share of frames that decord may replace by the previous one, which it does by default; it ignores 0."""


class PyAVReader(VideoReader):
    """Video reader that uses PyAV, Python bindings of FFmpeg."""

    name = "pyav"
    priority = 10
    requirements = ("av>=14",)

    def available(self) -> bool:
        return find_spec("av") is not None

    def preload(self) -> None:
        import av  # noqa: F401

    def open(self, data: bytes) -> OpenVideo:
        _check_container(data)
        return _PyAVVideo(data)


class DecordReader(VideoReader):
    """Video reader that uses decord, the library of qwen-vl-utils, for MP4, Matroska and AVI.

    PyAV reads the header, because decord reports a frame's size only by decoding one, and decodes rotated videos, which
    decord 0.6 does not support. decord reads the data from memory. About one in 500 damaged files crashes it.
    """

    name = "decord"
    priority = 5
    requirements = ("av>=14", "decord==0.6.0")
    may_crash = True

    def available(self) -> bool:
        return find_spec("decord") is not None and find_spec("av") is not None

    def preload(self) -> None:
        _import_decord()

    def open(self, data: bytes) -> OpenVideo:
        _check_container(data)
        # decord cannot restrict the formats that its FFmpeg detects. With the other signatures, FFmpeg prefers the
        # container to a text format that refers to other files or addresses, such as SDP. This does not hold for
        # MPEG-TS, in which decord cannot seek, and for an MP4 file that begins with `skip`.
        is_transport_stream = data[:1] == b"G" and data[4:8] not in _MP4_TYPES
        if is_transport_stream or data[4:8] == b"skip":
            raise undecodable_error()
        return _DecordVideo(data)


READERS: tuple[VideoReader, ...] = (PyAVReader(),)
"""The built-in readers that `video_reader="auto"` uses."""


class _PyAVVideo:
    def __init__(self, data: bytes) -> None:
        self._data = data
        with _open(data) as container:
            self.info = _read_header(container, is_counted=any(box in data for box in _COUNTED_BOXES))
        if not 0 < self.info.fps <= MAX_FPS:
            with _open(data) as container:
                self.info = replace(self.info, fps=_mean_fps(container) or self.info.fps)

    def is_rotated(self) -> bool:
        """Decode the first frame, which may have a display matrix in addition to the container's."""
        with _open(self._data) as container:
            frame = next(container.decode(video=0), None)
            return frame is not None and frame.rotation != 0

    def frames(self, indices: list[int], check_stop: StopCheck) -> Iterator[Pixels]:
        ranges = self._ranges(indices, check_stop)
        with _open(self._data) as container:
            container.streams.video[0].thread_type = "AUTO"
            yield from self._decode(container, ranges, check_stop)

    def _ranges(self, indices: list[int], check_stop: StopCheck) -> list[DecodedRange]:
        whole = [DecodedRange(start=0, stop=sys.maxsize, indices=indices)]
        if indices[-1] < MIN_SPACING * len(indices) or may_change_parameters(self._data):
            return whole
        with _open(self._data) as container:
            stream = container.streams.video[0]
            entries = find_entry_points(stream, _packets(container), self.info.frames, check_stop)
        return ranges_to_decode(indices, entries)

    def _decode(
        self, container: InputContainer, ranges: Sequence[DecodedRange], check_stop: StopCheck
    ) -> Iterator[Pixels]:
        decoder = RangeDecoder(container.streams.video[0].codec_context, _packets(container), check_stop)
        for place, part in enumerate(ranges):
            is_first = place == 0 and len(ranges) > 1
            end = yield from self._needed(decoder.decode(part), part.start, part.indices, decodes_all=is_first)
            if is_first and end != part.stop:  # some packets have no frame: nothing can be left out
                indices = [index for later in ranges[1:] for index in later.indices]
                rest = DecodedRange(start=part.stop, stop=sys.maxsize, indices=indices)
                yield from self._needed(decoder.decode(rest), end, indices)
                return

    def _needed(
        self, frames: Iterator[VideoFrame], number: int, indices: Sequence[int], *, decodes_all: bool = False
    ) -> Generator[Pixels, None, int]:
        """Yield the needed ones of frames that are counted from `number` on; return the number of the next one."""
        wanted = set(indices)
        for frame in frames:
            if number in wanted:
                yield self._upright(frame)
            number += 1
            if number > indices[-1] and not decodes_all:
                break
        return number

    def _upright(self, frame: Any) -> Pixels:
        # The limits were checked for the size in the header.
        if (frame.width, frame.height) != (self.info.width, self.info.height):
            raise undecodable_error()
        pixels: Pixels = frame.to_ndarray(format="rgb24")
        return np.rot90(pixels, frame.rotation // 90)


class _DecordVideo:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._pyav = _PyAVVideo(data)
        self.info = self._pyav.info

    def frames(self, indices: list[int], check_stop: StopCheck) -> Iterator[Pixels]:
        if self._pyav.is_rotated():
            yield from self._pyav.frames(indices, check_stop)
            return
        check_stop()
        video = self._open()
        if len(video) > self.info.frames:  # it counts the frames that an edit list leaves out
            yield from self._pyav.frames(indices, check_stop)
            return
        for index in indices:
            check_stop()
            yield self._decode(video, index)

    def _open(self) -> Any:
        decord = _import_decord()
        with _decord_errors():
            return decord.VideoReader(
                BytesIO(self._data), ctx=decord.cpu(0), num_threads=_DECORD_THREADS, fault_tol=_FAULT_TOLERANCE
            )

    def _decode(self, video: Any, index: int) -> Pixels:
        with _decord_errors():
            pixels: Pixels = video.get_batch([index]).asnumpy()[0]
        if pixels.shape != (self.info.height, self.info.width, 3):
            raise undecodable_error()
        return pixels


def _import_decord() -> Any:
    """Import decord after PyAV.

    decord makes the symbols of its libraries global. PyAV's copies of the same libraries, such as libvpx, would use
    them if they were loaded later.
    """
    import av  # noqa: F401
    import decord

    decord.logging.set_level(decord.logging.QUIET)
    return decord


@contextmanager
def _decord_errors() -> Iterator[None]:
    # decord's Python code raises the last three.
    decord = _import_decord()
    try:
        yield
    except (decord.DECORDError, RuntimeError, IndexError, AssertionError) as error:
        raise undecodable_error() from error


def _check_container(data: bytes) -> None:
    """Reject data without the signature of MP4/QuickTime, Matroska/WebM, AVI or MPEG-TS.

    This check comes before FFmpeg, which also reads playlists and opens the files and URLs that they list.
    """
    mp4 = data[4:8] in _MP4_TYPES
    transport_stream = data[0:1] == b"G" and data[188:189] == b"G" and data[376:377] == b"G"
    avi = data[:4] == b"RIFF" and data[8:12] == b"AVI "
    if not (mp4 or transport_stream or avi or data[:4] == b"\x1a\x45\xdf\xa3"):
        raise undecodable_error()


def _read_header(container: InputContainer, *, is_counted: bool) -> VideoInfo:
    """Read the container's header without decoding; count the frames that are shown if it has no or a wrong number.

    To count packets also makes FFmpeg allocate all memory that their tables need, before frames are decoded.
    """
    stream = container.streams.video[0] if container.streams.video else None
    if stream is None or stream.codec_context is None:  # no context if FFmpeg has no such codec
        raise undecodable_error()
    if stream.codec_context.codec.name not in CODECS:  # the container's options do not apply to decoding
        raise undecodable_error()
    frames = stream.frames
    if not frames or is_counted:
        frames = sum(not packet.is_discard for packet in _packets(container))
    return VideoInfo(
        frames=frames,
        fps=float(stream.average_rate or 0),
        width=stream.codec_context.width,
        height=stream.codec_context.height,
    )


def _mean_fps(container: InputContainer) -> float:
    """Return the frames per second by the times of the packets; 0 if these do not show it."""
    times = np.fromiter(
        (packet.pts for packet in _packets(container) if packet.pts is not None and not packet.is_discard), np.int64
    )
    span = int(np.ptp(times)) if times.size else 0
    time_base = container.streams.video[0].time_base
    return float((times.size - 1) / (span * time_base)) if span > 0 and time_base else 0.0


def _packets(container: InputContainer) -> Iterator[Packet[VideoStream]]:
    return (packet for packet in container.demux(container.streams.video[0]) if packet.size)


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
