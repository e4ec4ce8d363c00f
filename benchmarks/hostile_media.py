"""Media files of a few kilobytes that cost a decoder gigabytes of memory or many seconds.

They are the files of rules 23, 24, 25, 31 and 41 of SECURITY.md, for tests and for `benchmarks.attacks`. Each is built
from its format's structures, without an encoder, and is equal in every run.

    python -m benchmarks.hostile_media FOLDER

writes all of them.
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from .hostile_documents import inflating, nested_forms

MAX_LACES = 256
"""Maximum number of frames in a laced block: their number minus one is a byte (RFC 9559, section 10.3)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostileFile:
    """A file and what it does.

    Attributes:
        rule: the rule of SECURITY.md that it violates.
        kind: the kind of content part that it is sent as.
        media_type: its type in a data: URL.
        build: builds the file.
    """

    rule: int
    kind: Literal["image", "video", "file"]
    media_type: str
    build: Callable[[], bytes]


# MP4: boxes of ISO/IEC 14496-12


def box(kind: bytes, *contents: bytes) -> bytes:
    """Return a box: its size including this header, its type, its contents (section 4.2)."""
    body = b"".join(contents)
    return struct.pack(">I", 8 + len(body)) + kind + body


def full_box(kind: bytes, *contents: bytes, flags: int = 0) -> bytes:
    """Return a box with a version, which is 0, and flags (section 4.2)."""
    return box(kind, struct.pack(">I", flags), *contents)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleTable:
    """The claims of one track's sample table.

    Attributes:
        samples: number of samples, each of one byte, all in one chunk.
        edits: (duration in the movie, first time in the track) of each entry of the edit list, in time units.
        has_offsets: whether composition offsets, all 0, are stated: FFmpeg expands their table to one entry per sample.
    """

    samples: int
    edits: tuple[tuple[int, int], ...] = ()
    has_offsets: bool = False


def mp4(*tables: SampleTable) -> bytes:
    """Return an MP4 file with one video track per table, and no media data.

    A table of equal sizes, durations and chunks states its number of samples in three places (`stsz`, `stts`, `stsc`,
    sections 8.6.1, 8.7.3 and 8.7.4). FFmpeg expands it to 24 bytes per sample when it opens the file, and to 12 more
    with composition offsets (`ctts`, section 8.6.1.3). For each entry of the edit list (`elst`, section 8.6.6), it goes
    through the offsets of all earlier samples.
    """
    media = box(b"mdat", b"\0")
    tracks = [_track(number, table, len(_FILE_TYPE) + 8) for number, table in enumerate(tables, 1)]
    return _FILE_TYPE + media + box(b"moov", _MOVIE_HEADER, *tracks)


def fragmented_mp4(fragments: int, samples: int) -> bytes:
    """Return an MP4 file with one video track, whose samples are in movie fragments, and no media data.

    A track run (section 8.8.8) whose samples all have the defaults of the track (`trex`, section 8.8.3) states
    only their number. FFmpeg expands it to 36 bytes per sample when it gets to the fragment.
    """
    defaults = box(b"mvex", full_box(b"trex", struct.pack(">IIIII", 1, 1, 1, 1, 0)))
    run = full_box(b"trun", struct.pack(">I", samples))  # codespell:ignore trun
    track = box(b"traf", full_box(b"tfhd", struct.pack(">I", 1), flags=0x020000), run)  # offsets are relative to `moof`
    numbers = (full_box(b"mfhd", struct.pack(">I", number)) for number in range(1, fragments + 1))
    movie = box(b"moov", _MOVIE_HEADER, _track(1, SampleTable(samples=0), 0), defaults)
    return _FILE_TYPE + movie + b"".join(box(b"moof", number, track) + box(b"mdat", b"\0") for number in numbers)


_FILE_TYPE = box(b"ftyp", b"isom", bytes(4), b"isom")
_MOVIE_HEADER = full_box(b"mvhd", struct.pack(">IIIIIH", 0, 0, 1000, 1000, 0x10000, 0x100), bytes(70), b"\0\0\0\x09")


def _track(number: int, table: SampleTable, offset: int) -> bytes:
    duration = table.samples % 2**32
    header = full_box(
        b"tkhd", struct.pack(">IIIII", 0, 0, number, 0, 1000), bytes(52), b"\0\x40\0\0\0\x40\0\0", flags=3
    )
    edits = b"".join(struct.pack(">IiI", length, start, 0x10000) for length, start in table.edits)
    edit_list = box(b"edts", full_box(b"elst", struct.pack(">I", len(table.edits)), edits)) if edits else b""
    media_header = full_box(b"mdhd", struct.pack(">IIIIHH", 0, 0, 1000, duration, 0x55C4, 0))
    handler = full_box(b"hdlr", bytes(4), b"vide", bytes(13))
    source = box(b"dinf", full_box(b"dref", struct.pack(">I", 1), full_box(b"url ", flags=1)))
    information = box(b"minf", full_box(b"vmhd", bytes(8), flags=1), source, _sample_table(table, offset))
    return box(b"trak", header, edit_list, box(b"mdia", media_header, handler, information))


def _sample_table(table: SampleTable, offset: int) -> bytes:
    entry = box(
        b"avc1", bytes(6), b"\0\x01", bytes(16), struct.pack(">HH", 64, 64), bytes(14), bytes(32), b"\0\x18\xff\xff"
    )
    offsets = full_box(b"ctts", struct.pack(">III", 1, table.samples, 0)) if table.has_offsets else b""
    return box(
        b"stbl",
        full_box(b"stsd", struct.pack(">I", 1), entry),
        full_box(b"stts", struct.pack(">III", 1, table.samples, 1)),
        full_box(b"stsc", struct.pack(">IIII", 1, 1, table.samples, 1)),
        full_box(b"stsz", struct.pack(">II", 1, table.samples)),
        full_box(b"stco", struct.pack(">II", 1, offset)),
        offsets,
    )


# Matroska: EBML elements of RFC 8794 and RFC 9559


def element(identifier: int, *contents: bytes) -> bytes:
    """Return an EBML element with a size of eight bytes (RFC 8794, section 4.4)."""
    body = b"".join(contents)
    name = identifier.to_bytes((identifier.bit_length() + 7) // 8, "big")
    return name + struct.pack(">Q", 1 << 56 | len(body)) + body


def laced_matroska(packets: int, packet_bytes: int = 1024) -> bytes:
    """Return a Matroska file whose blocks have the maximum number of laced frames, which contain no data.

    With fixed-size lacing (RFC 9559, section 10.3.4), a block of 14 bytes holds 256 empty frames. Header stripping
    (section 5.1.4.1.31) puts the same bytes in front of each, so that FFmpeg returns it as a packet. The header has no
    frame count, so all packets have to be counted.

    FFmpeg first keeps the packets of 5 MB of content in memory. Those of two bytes need more than a gigabyte: if the
    memory is limited, FFmpeg crashes there, before packets are counted.
    """
    stripped = b"\xff\xd8".ljust(packet_bytes, b"\0")
    header = element(0x1A45DFA3, element(0x4282, b"matroska"))
    information = element(0x1549A966, element(0x2AD7B1, b"\x0f\x42\x40"))
    size = element(0xE0, element(0xB0, b"\x40"), element(0xBA, b"\x40"))
    prefix = element(0x6D80, element(0x6240, element(0x5034, element(0x4254, b"\3"), element(0x4255, stripped))))
    track = element(
        0xAE,
        element(0xD7, b"\1"),
        element(0x73C5, b"\1"),
        element(0x83, b"\1"),
        element(0x86, b"V_MJPEG"),
        size,
        prefix,
    )
    key_frame_with_fixed_lacing = 0x84
    block = element(0xA3, struct.pack(">BhBB", 0x81, 0, key_frame_with_fixed_lacing, MAX_LACES - 1))
    cluster = element(0x1F43B675, element(0xE7, b"\0"), block * (packets // MAX_LACES))
    return header + element(0x18538067, information, element(0x1654AE6B, track), cluster)


# JPEG: marker segments of ITU-T T.81, annex B


def segment(marker: int, *contents: bytes) -> bytes:
    """Return a marker segment (section B.1.1.4)."""
    body = b"".join(contents)
    return struct.pack(">BBH", 0xFF, marker, 2 + len(body)) + body


def progressive_jpeg(scans: int, side: int = 8000) -> bytes:
    """Return a progressive grayscale JPEG whose scans contain no data.

    A decoder goes through all blocks of the image in each scan (section G.1.2.3): one of 10 bytes costs as much as one
    of many kilobytes.

    Args:
        scans: number of scans of AC coefficients, after the one of DC coefficients.
        side: width and height in pixels.
    """
    return _jpeg(side, progressive=True, scans=_scan(0, 0) + _scan(1, 5) * scans)


def exif_jpeg(segments: int, size: int = 6) -> bytes:
    """Return a JPEG with many APP1 segments of EXIF metadata, which Pillow joins: each one copies all earlier ones.

    Args:
        segments: number of segments.
        size: bytes of metadata in each.
    """
    return _jpeg(64, metadata=segment(0xE1, b"Exif\0\0", bytes(size)) * segments)


def _jpeg(side: int, *, progressive: bool = False, scans: bytes = b"", metadata: bytes = b"") -> bytes:
    quantization = segment(0xDB, b"\0", b"\1" * 64)
    frame = segment(0xC2 if progressive else 0xC0, struct.pack(">BHHB", 8, side, side, 1), b"\1\x11\0")
    one_code = bytes([1]) + bytes(15) + b"\0"  # of one bit, for the value 0
    tables = segment(0xC4, b"\0", one_code) + segment(0xC4, b"\x10", one_code)
    return b"\xff\xd8" + metadata + quantization + frame + tables + (scans or _scan(0, 63)) + b"\xff\xd9"


def _scan(first: int, last: int) -> bytes:
    """Return a scan of coefficients `first` to `last` (section B.2.3) without entropy-coded data, which means zeros."""
    return segment(0xDA, b"\1\1\0", bytes([first, last, 0]))


# TIFF: an image file directory of TIFF 6.0, section 2


def damaged_tiff(tags: int) -> bytes:
    """Return a TIFF with tags whose values are larger than the file: Pillow warns about each, in two lines."""
    required = ((256, 8), (257, 8), (258, 8), (259, 1), (262, 1), (273, 8), (277, 1), (278, 8), (279, 64))
    entries = [struct.pack("<HHIHH", tag, 3, 1, value, 0) for tag, value in required]
    entries += [struct.pack("<HHII", 1000 + number, 2, 2**31, 0) for number in range(tags)]
    return (
        b"II*\0"
        + struct.pack("<I", 8 + 64)
        + bytes(64)
        + struct.pack("<H", len(entries))
        + b"".join(entries)
        + bytes(4)
    )


def padded_jpeg(padding: int) -> bytes:
    """Return a JPEG with fill bytes before its first marker (section B.1.1.2), which Pillow reads one by one."""
    return _jpeg(64, metadata=b"\xff" * padding)


HOSTILE: Mapping[str, HostileFile] = MappingProxyType(
    {
        "MP4: one track of 80 million samples": HostileFile(
            rule=23, kind="video", media_type="video/mp4", build=lambda: mp4(SampleTable(samples=80_000_000))
        ),
        "MP4: composition offsets of 60 million samples": HostileFile(
            rule=23,
            kind="video",
            media_type="video/mp4",
            build=lambda: mp4(SampleTable(samples=60_000_000, has_offsets=True)),
        ),
        "MP4: four tracks of 25 million samples": HostileFile(
            rule=23, kind="video", media_type="video/mp4", build=lambda: mp4(*(SampleTable(samples=25_000_000),) * 4)
        ),
        "MP4: three tracks of 8 million samples": HostileFile(
            rule=23, kind="video", media_type="video/mp4", build=lambda: mp4(*(SampleTable(samples=8_000_000),) * 3)
        ),
        "MP4: two fragments of 10 million samples": HostileFile(
            rule=23, kind="video", media_type="video/mp4", build=lambda: fragmented_mp4(2, 10_000_000)
        ),
        "MP4: 20 fragments of 1 million samples": HostileFile(
            rule=23, kind="video", media_type="video/mp4", build=lambda: fragmented_mp4(20, 1_000_000)
        ),
        "JPEG: 5,000 progressive scans": HostileFile(
            rule=24, kind="image", media_type="image/jpeg", build=lambda: progressive_jpeg(5000)
        ),
        "JPEG: 500,000 EXIF segments": HostileFile(
            rule=24, kind="image", media_type="image/jpeg", build=lambda: exif_jpeg(500_000)
        ),
        "JPEG: 400,000 EXIF segments of 12 MB": HostileFile(
            rule=24, kind="image", media_type="image/jpeg", build=lambda: exif_jpeg(400_000, size=20)
        ),
        "JPEG: 15 million fill bytes": HostileFile(
            rule=24, kind="image", media_type="image/jpeg", build=lambda: padded_jpeg(15_000_000)
        ),
        "Matroska: 15 million laced packets": HostileFile(
            rule=25, kind="video", media_type="video/x-matroska", build=lambda: laced_matroska(15_000_000)
        ),
        "MP4: 60,000 edits": HostileFile(
            rule=25,
            kind="video",
            media_type="video/mp4",
            build=lambda: mp4(SampleTable(samples=700_000, edits=((1, 690_000),) * 60_000, has_offsets=True)),
        ),
        "TIFF: 60,000 damaged tags": HostileFile(
            rule=31, kind="image", media_type="image/tiff", build=lambda: damaged_tiff(60_000)
        ),
        "PDF: a gigabyte of content": HostileFile(
            rule=41, kind="file", media_type="application/pdf", build=lambda: inflating(1 << 30)
        ),
        "PDF: 2 billion lines": HostileFile(
            rule=41, kind="file", media_type="application/pdf", build=lambda: nested_forms(levels=9, copies=11)
        ),
    }
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in HOSTILE.items():
        suffix = file.media_type.rpartition("/")[2]
        path = folder / f"{name.lower().replace(':', '').replace(',', '').replace(' ', '-')}.{suffix}"
        path.write_bytes(file.build())
        print(path)


if __name__ == "__main__":
    main()
