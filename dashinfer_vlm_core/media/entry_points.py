"""Where the decoder of a video can begin, so that frames far apart are decoded without those between them.

An entry point is a packet before which nothing is needed to decode it and all later ones, and whose frames all follow
the earlier ones in time. In H.264 and H.265 it is an IDR picture; other random access points, as of open groups of
pictures, may have frames that refer to earlier ones. All pictures of Motion JPEG and ProRes are entry points.
"""

from __future__ import annotations

import itertools
import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .types import StopCheck

if TYPE_CHECKING:
    from av.packet import Packet
    from av.video.codeccontext import VideoCodecContext
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

MAX_UNITS = 1024
"""Maximum number of NAL units that are read of a packet: millions of tiny ones would take seconds, without a stop."""

_INTRA_CODECS = frozenset({"mjpeg", "prores"})
_START_CODE = re.compile(rb"\x00\x00\x01")
_SEVERAL_DESCRIPTIONS = re.compile(rb"stsd.{4}(?!\x00\x00\x00[\x00\x01])|cmvd", re.DOTALL)
"""A box `stsd` of MP4 (ISO/IEC 14496-12, 8.5.2) with more than one entry, or a compressed header, that may have it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _NalTypes:
    """The types of NAL units of a codec (H.264, table 7-1; H.265, table 7-1).

    Attributes:
        shift: lowest bit of the type in the first byte.
        mask: its bits after that.
        idr: of pictures that begin a sequence.
        parameters: of parameter sets.
        length_offset: byte of the configuration record whose lowest two bits are the size of lengths, minus 1.
    """

    shift: int
    mask: int
    idr: frozenset[int]
    parameters: frozenset[int]
    length_offset: int


_NAL_TYPES = {
    "h264": _NalTypes(shift=0, mask=31, idr=frozenset({5}), parameters=frozenset({7, 8, 15}), length_offset=4),
    "hevc": _NalTypes(shift=1, mask=63, idr=frozenset({19, 20}), parameters=frozenset({32, 33, 34}), length_offset=21),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedRange:
    """Consecutive packets from an entry point on.

    Attributes:
        start: number of the first packet, and of the first frame.
        stop: number of the next packet that is not needed.
        indices: frames that are needed.
    """

    start: int
    stop: int
    indices: Sequence[int]


class RangeDecoder:
    """Decodes ranges of the packets of a stream, in their order.

    Args:
        codec: the decoder.
        packets: all packets of the stream.
        check_stop: called for each packet that is skipped, and each decoded frame.
    """

    def __init__(self, codec: VideoCodecContext, packets: Iterator[Packet[VideoStream]], check_stop: StopCheck) -> None:
        self._codec = codec
        self._packets = packets
        self._check_stop = check_stop
        self._position = 0

    def decode(self, part: DecodedRange) -> Iterator[VideoFrame]:
        """Yield the frames of a range; the caller can end before the last one."""
        if self._position:
            self._codec.flush_buffers()
        for _ in self._take(part.start):
            self._check_stop()
        decoded = (self._codec.decode(packet) for packet in itertools.chain(self._take(part.stop), [None]))
        for frame in itertools.chain.from_iterable(decoded):
            self._check_stop()
            yield frame

    def _take(self, stop: int) -> Iterator[Packet[VideoStream]]:
        while self._position < stop and (packet := next(self._packets, None)) is not None:
            self._position += 1
            yield packet


def may_change_parameters(data: bytes) -> bool:
    """Return whether a video may have several sample descriptions.

    FFmpeg passes the parameter sets of the next description to the decoder with its first packet: none can be skipped.
    The bytes may also occur in the content of a video, which is then decoded as a whole.
    """
    return _SEVERAL_DESCRIPTIONS.search(data) is not None


def ranges_to_decode(indices: Sequence[int], entries: Sequence[int]) -> list[DecodedRange]:
    """Return the ranges that contain frames; adjacent groups of pictures are one range.

    Args:
        indices: frame numbers, ascending.
        entries: packet numbers of entry points, ascending, and the number of packets; the first is 0.
    """
    ranges: list[DecodedRange] = []
    for group, found in itertools.groupby(indices, key=lambda index: bisect_right(entries, index) - 1):
        start, stop = entries[group], entries[group + 1]
        wanted = list(found)
        if ranges and ranges[-1].stop == start:
            start, wanted = ranges[-1].start, [*ranges.pop().indices, *wanted]
        ranges.append(DecodedRange(start=start, stop=stop, indices=wanted))
    return ranges


def find_entry_points(
    stream: VideoStream, packets: Iterable[Packet[VideoStream]], frames: int, check_stop: StopCheck
) -> list[int]:
    """Return the numbers of the packets that are entry points, and the number of packets.

    Args:
        stream: the stream, which is not decoded.
        packets: all of its packets, in the order of decoding.
        frames: number of frames by the header.
        check_stop: called for each packet.

    Returns:
        Only 0 and a number above that of all packets if these are not one for each frame, or the codec is not
        supported.
    """
    name = stream.codec_context.codec.name
    times: list[int] = []
    entries: dict[int, bool] = {}  # with parameter sets or without
    is_regular = True
    for number, packet in enumerate(itertools.islice(packets, frames + 1)):
        check_stop()
        is_entry, parameters = _inspect(packet, name, stream.codec_context.extradata or b"")
        is_damaged = packet.pts is None or packet.is_discard or packet.is_corrupt
        # Parameter sets may change the decoding of all later pictures.
        is_regular = is_regular and not is_damaged and (is_entry or not parameters)
        times.append(packet.pts or 0)
        if is_entry:
            entries[number] = parameters
    if not is_regular or len(times) != frames or len(set(times)) < frames:
        return [0, sys.maxsize]
    has_parameters = any(entries.values())
    return [0, *_ordered([entry for entry in entries if entries[entry] == has_parameters], times), frames]


def _ordered(entries: Sequence[int], times: Sequence[int]) -> Iterator[int]:
    """Return the entries, other than the first packet, before which all frames are earlier than all others."""
    earliest = [*itertools.accumulate(reversed(times), min)][::-1]
    latest = [*itertools.accumulate(times, max)]
    return (entry for entry in entries if entry and latest[entry - 1] < earliest[entry])


def _inspect(packet: Packet[VideoStream], codec: str, extradata: bytes) -> tuple[bool, bool]:
    """Return whether a packet is an entry point by its content, and whether it has parameter sets."""
    if codec in _INTRA_CODECS:
        return True, False
    types = _NAL_TYPES.get(codec)
    if types is None:
        return False, False
    headers = [*itertools.islice(_nal_headers(memoryview(packet), types, extradata), MAX_UNITS + 1)]
    if len(headers) > MAX_UNITS:
        return False, True  # others may have parameter sets
    found = {byte >> types.shift & types.mask for byte in headers}
    return bool(found & types.idr), bool(found & types.parameters)


def _nal_headers(data: memoryview, types: _NalTypes, extradata: bytes) -> Iterator[int]:
    """Return the first byte of each NAL unit, with start codes or preceded by their lengths."""
    if extradata[:1] != b"\x01" or len(extradata) <= types.length_offset:
        yield from (data[match.end()] for match in _START_CODE.finditer(data) if match.end() < len(data))
        return
    size = (extradata[types.length_offset] & 3) + 1
    position = 0
    while position + size < len(data):
        yield data[position + size]
        position += size + int.from_bytes(data[position : position + size], "big")
