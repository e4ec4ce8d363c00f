"""Frames far apart are decoded without those between them, and equal those of decoding everything."""

from __future__ import annotations

import io
import struct
import sys
from fractions import Fraction

import numpy as np
import pytest

from dashinfer_vlm_core.errors import MediaUndecodable
from dashinfer_vlm_core.media import PyAVReader
from dashinfer_vlm_core.media.entry_points import MAX_UNITS, DecodedRange, find_entry_points, ranges_to_decode
from dashinfer_vlm_core.media.readers import MIN_SPACING
from tests.cases import cases
from tests.samples import video_frame

FRAMES = 96
GROUP = 12
INDICES = ([0, 95], [0, 50, 51, 94], [17, 90], [3, 11, 12, 95])
X264 = {"x264-params": f"keyint={GROUP}:min-keyint={GROUP}:scenecut=0:bframes=3"}
X265 = f"keyint={GROUP}:min-keyint={GROUP}:scenecut=0:log-level=none"
FILES = {
    "mp4": ({"options": X264}, True),
    "matroska": ({"options": X264, "container": "matroska"}, True),
    "mpegts": ({"options": X264, "container": "mpegts"}, True),
    "avi": ({"options": X264, "container": "avi"}, True),
    "variable frame rate": ({"options": X264, "step": lambda index: 1500 + 977 * (index % 7)}, True),
    "h265": ({"codec": "libx265", "options": {"x265-params": f"{X265}:open-gop=0"}}, True),
    "mjpeg": ({"codec": "mjpeg", "container": "matroska"}, True),
    "open groups": ({"options": {"x264-params": f"open-gop=1:{X264['x264-params']}"}}, False),
    "h265, open groups": ({"codec": "libx265", "options": {"x265-params": f"{X265}:open-gop=1"}}, False),
    "intra refresh": ({"options": {"x264-params": f"intra-refresh=1:keyint={GROUP}"}}, False),
    "vp9": ({"codec": "libvpx-vp9", "container": "webm"}, False),
}


def encode(codec="libx264", container="mp4", options=None, step=lambda index: 3000):
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream = file.add_stream(codec, rate=30, options={"g": str(GROUP), **(options or {})})
        stream.width, stream.height = 64, 48
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.codec_context.time_base = Fraction(1, 90_000)
        time = 0
        for index in range(FRAMES):
            frame = av.VideoFrame.from_ndarray(video_frame(index, 48, 64), format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 90_000)
            time += step(index)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return buffer.getvalue()


def packets(data):
    import av

    with av.open(io.BytesIO(data)) as file:
        return [bytes(packet) for packet in file.demux(video=0) if packet.size]


def entry_points(data):
    import av

    with av.open(io.BytesIO(data)) as file:
        stream = file.streams.video[0]
        return find_entry_points(stream, (packet for packet in file.demux(stream) if packet.size), FRAMES, go_on)


def box(kind, *parts):
    content = b"".join(parts)
    return struct.pack(">I", 8 + len(content)) + kind + content


def numbers(*values):
    return struct.pack(f">{len(values)}I", *values)


def description(data):
    """Return the sample description of an MP4 file."""
    start = data.index(b"avc1", data.index(b"stsd")) - 4
    return data[start : start + int.from_bytes(data[start : start + 4], "big")]


def joined(first, second):
    """Return an MP4 file with the packets of two files, each with its sample description."""
    head, tail = packets(first), packets(second)
    count, keyframes = len(head + tail), range(1, len(head + tail) + 1, GROUP)
    matrix = numbers(0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)

    def header(*offsets):
        table = box(
            b"stbl",
            box(b"stsd", numbers(0, 2), description(first), description(second)),
            box(b"stts", numbers(0, 1, count, 1)),
            box(b"stss", numbers(0, len(keyframes), *keyframes)),
            box(b"stsc", numbers(0, 2, 1, len(head), 1, 2, len(tail), 2)),
            box(b"stsz", numbers(0, 0, count, *map(len, head + tail))),
            box(b"stco", numbers(0, 2, *offsets)),
        )
        references = box(b"dinf", box(b"dref", numbers(0, 1), box(b"url ", numbers(1))))
        content = box(b"minf", box(b"vmhd", numbers(1), bytes(8)), references, table)
        clock = box(b"mdhd", numbers(0, 0, 0, 25, count), b"\x55\xc4\0\0")
        media = box(b"mdia", clock, box(b"hdlr", numbers(0, 0), b"vide", bytes(13)), content)
        track = box(b"tkhd", numbers(3, 0, 0, 1, 0, count * 40, 0, 0, 0, 0), matrix, numbers(64 << 16, 48 << 16))
        movie = box(
            b"mvhd", numbers(0, 0, 0, 1000, count * 40, 0x10000), b"\1\0", bytes(10), matrix, bytes(24), numbers(2)
        )
        return box(b"ftyp", b"isom", numbers(0), b"isomavc1") + box(b"moov", movie, box(b"trak", track, media))

    start = len(header(0, 0)) + 8
    return header(start, start + sum(map(len, head))) + box(b"mdat", *head, *tail)


def go_on():
    """Never stop decoding."""


def read(data, indices):
    return list(PyAVReader().open(data).frames(indices, go_on))


@cases("name", FILES)
def test_frames_equal_those_of_decoding_everything(name):
    options, has_entry_points = FILES[name]
    data = encode(**options)
    every = read(data, [*range(FRAMES)])
    assert len(every) == FRAMES
    for indices in INDICES:
        assert indices[-1] >= MIN_SPACING * len(indices)
        np.testing.assert_array_equal(read(data, indices), [every[index] for index in indices])
    assert (len(entry_points(data)) >= FRAMES // GROUP) == has_entry_points


def trimmed(data, first, count, rate):
    """Return the MP4 file with an edit list that shows some of its frames, as `ffmpeg -ss 5 -t 10 -c copy` does."""
    seconds, ticks = (struct.unpack_from(">I", data, data.index(kind) + 16)[0] for kind in (b"mvhd", b"mdhd"))
    start = data.index(b"elst") + 12
    (time,) = struct.unpack_from(">I", data, start + 4)
    edit = numbers(count * seconds // rate, time + first * ticks // rate)
    return data[:start] + edit + data[start + 8 :]


def test_frames_that_an_edit_list_leaves_out_are_not_counted():
    data = encode(options=X264)
    every = read(data, [*range(FRAMES)])
    part = trimmed(data, 20, 60, rate=30)
    assert PyAVReader().open(part).info.frames == 60
    for indices in ([*range(60)], [0, 59]):
        np.testing.assert_array_equal(read(part, indices), [every[20 + index] for index in indices])


def test_parameters_of_a_later_sample_description_are_used():
    groups = f"keyint={GROUP}:min-keyint={GROUP}:scenecut=0:bframes=0"
    profiles = ({"profile": "baseline", "x264-params": groups}, {"profile": "high", "x264-params": f"{groups}:ref=4"})
    data = joined(*(encode(options=options) for options in profiles))
    every = read(data, [*range(2 * FRAMES)])
    indices = [5, 50, FRAMES + 30, 2 * FRAMES - 2]  # not the first packets after the change
    np.testing.assert_array_equal(read(data, indices), [every[index] for index in indices])


def test_groups_without_needed_frames_are_not_decoded():
    data = bytearray(encode(options=X264))
    clean = read(bytes(data), [0, 95])
    entries = entry_points(bytes(data))
    for packet in packets(bytes(data))[entries[2] : entries[4]]:
        start = data.index(packet) + 5  # after the length and the type
        data[start : start + len(packet) - 5] = bytes(len(packet) - 5)
    np.testing.assert_array_equal(read(bytes(data), [0, 95]), clean)
    with pytest.raises(MediaUndecodable):
        read(bytes(data), [*range(FRAMES)])


@pytest.mark.parametrize(("units", "expected"), [(MAX_UNITS - 1, [0, 1, 2]), (MAX_UNITS, [0, sys.maxsize])])
def test_packets_with_many_units_are_no_entry_points(units, expected):
    import av

    found = [av.Packet(data) for data in (b"\0\0\1\x65", b"\0\0\1\x09" * units + b"\0\0\1\x65")]  # IDR pictures
    for time, packet in enumerate(found):
        packet.pts = time
    with av.open(io.BytesIO(encode(container="mpegts"))) as file:
        assert find_entry_points(file.streams.video[0], found, 2, go_on) == expected


def test_packets_without_frames_change_nothing():
    import av

    buffer = io.BytesIO()
    with av.open(io.BytesIO(encode(options=X264))) as source, av.open(buffer, "w", format="matroska") as file:
        stream = file.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(packet for packet in source.demux(video=0) if packet.size):
            packet.stream = stream
            packet.pts, packet.dts = 2 * packet.pts, 2 * packet.dts
            if number == 5:
                end = av.Packet(b"\x00\x00\x00\x01\x0a")  # a NAL unit: the end of a sequence
                end.stream, end.time_base = stream, packet.time_base
                end.pts, end.dts = packet.pts + 1500, packet.dts - 1500
                file.mux(end)
            file.mux(packet)
    data = buffer.getvalue()
    assert len(packets(data)) == FRAMES + 1
    every = read(data, [*range(FRAMES)])
    np.testing.assert_array_equal(read(data, [0, 60, 95]), [every[index] for index in (0, 60, 95)])


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        ([0, 29], [(0, 10, [0]), (20, 30, [29])]),
        ([0, 9, 10, 25], [(0, 30, [0, 9, 10, 25])]),
        ([12], [(10, 20, [12])]),
    ],
)
def test_ranges_are_groups_with_needed_frames(indices, expected):
    found = ranges_to_decode(indices, [0, 10, 20, 30])
    assert found == [DecodedRange(start=start, stop=stop, indices=needed) for start, stop, needed in expected]
