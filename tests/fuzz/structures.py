"""Mutations that know the structure of a file: a decoder reads further into it than into a file with random damage.

A file is a tree of nodes. Each format has a function that parses a valid file and one that writes a tree, in which
lengths, checksums and counts are right unless a mutation changed them.
"""

from __future__ import annotations

import contextlib
import copy
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from benchmarks.hostile_documents import pdf
from tests.fuzz.mutations import EDGES

MAX_COPIES = (1, 1, 3, 200)
MAX_FILE_BYTES = 1 << 20


@dataclass
class Node:
    """A box, element, chunk, segment, block or directory entry.

    Attributes:
        kind: its type, with everything that comes before its length.
        body: its contents, if it has no children.
        children: its contents, if they are nodes.
        extra_length: what is added to its length in the file.
    """

    kind: bytes
    body: bytes = b""
    children: list[Node] = field(default_factory=list)
    extra_length: int = 0


Write = Callable[[Sequence[Node]], bytes]


@dataclass(frozen=True)
class Structure:
    """A parsed file, and how it is written."""

    nodes: Sequence[Node]
    write: Write


# ISO base media (MP4)

_BOXES = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts", b"dinf", b"udta", b"mvex")


def parse_mp4(data: bytes) -> list[Node]:
    nodes = []
    while data:
        size, kind = struct.unpack_from(">I4s", data)
        body, data = data[8:size], data[size:]
        nodes.append(Node(kind, children=parse_mp4(body)) if kind in _BOXES else Node(kind, body))
    return nodes


def write_mp4(nodes: Sequence[Node]) -> bytes:
    return b"".join(_write_box(node) for node in nodes)


def _write_box(node: Node) -> bytes:
    body = write_mp4(node.children) or node.body
    return struct.pack(">I", (8 + len(body) + node.extra_length) % 2**32) + node.kind + body


# EBML (Matroska, WebM)

_ELEMENTS = [
    bytes.fromhex(name)
    for name in ("1a45dfa3", "18538067", "1549a966", "1654ae6b", "ae", "e0", "1f43b675", "a0", "1c53bb6b", "114d9b74")
]


def _ebml_size(data: bytes, start: int) -> tuple[int, int]:
    """Return the size of an element's contents, and where they begin."""
    count = 9 - data[start].bit_length()
    value = int.from_bytes(data[start : start + count], "big") & (1 << 7 * count) - 1
    unknown = value == (1 << 7 * count) - 1
    return (len(data) if unknown else value), start + count


def parse_ebml(data: bytes) -> list[Node]:
    nodes = []
    while data:
        length = 9 - data[0].bit_length()
        kind = data[:length]
        size, start = _ebml_size(data, length)
        body, data = data[start : start + size], data[start + size :]
        nodes.append(Node(kind, children=parse_ebml(body)) if kind in _ELEMENTS else Node(kind, body))
    return nodes


def write_ebml(nodes: Sequence[Node]) -> bytes:
    return b"".join(_write_element(node) for node in nodes)


def _write_element(node: Node) -> bytes:
    body = write_ebml(node.children) or node.body
    return node.kind + struct.pack(">Q", 1 << 56 | (len(body) + node.extra_length) % 2**56) + body


# JPEG: marker segments; the coded data after a scan's header belong to it


def parse_jpeg(data: bytes) -> list[Node]:
    nodes, position = [Node(b"\xff\xd8")], 2
    while data[position + 1] != 0xD9:
        size = int.from_bytes(data[position + 2 : position + 4], "big")
        kind, end = data[position : position + 2], position + 2 + size
        nodes.append(Node(kind, data[position + 4 : end]))
        position = _end_of_coded_data(data, end) if kind == b"\xff\xda" else end
        if position > end:
            nodes.append(Node(b"", data[end:position]))
    return [*nodes, Node(b"\xff\xd9")]


def _end_of_coded_data(data: bytes, start: int) -> int:
    position = data.index(b"\xff", start)
    while data[position + 1] == 0 or 0xD0 <= data[position + 1] <= 0xD7:
        position = data.index(b"\xff", position + 2)
    return position


def write_jpeg(nodes: Sequence[Node]) -> bytes:
    return b"".join(_write_segment(node) for node in nodes)


def _write_segment(node: Node) -> bytes:
    body = write_jpeg(node.children) + node.body
    if node.kind in (b"", b"\xff\xd8", b"\xff\xd9"):
        return node.kind + body
    return node.kind + struct.pack(">H", (2 + len(body) + node.extra_length) % 2**16) + body


# PNG and WebP: chunks


def parse_png(data: bytes) -> list[Node]:
    nodes, position = [], 8
    while position < len(data):
        size, kind = struct.unpack_from(">I4s", data, position)
        nodes.append(Node(kind, data[position + 8 : position + 8 + size]))
        position += 12 + size
    return nodes


def write_png(nodes: Sequence[Node]) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + b"".join(_write_png_chunk(node) for node in nodes)


def _write_png_chunk(node: Node) -> bytes:
    body = b"".join(map(_write_png_chunk, node.children)) + node.body
    length = (len(body) + node.extra_length) % 2**32
    return struct.pack(">I", length) + node.kind + body + struct.pack(">I", zlib.crc32(node.kind + body))


def parse_webp(data: bytes) -> list[Node]:
    nodes, position = [], 12
    while position < len(data):
        kind, size = struct.unpack_from("<4sI", data, position)
        nodes.append(Node(kind, data[position + 8 : position + 8 + size]))
        position += 8 + size + size % 2
    return nodes


def write_webp(nodes: Sequence[Node]) -> bytes:
    body = b"WEBP" + b"".join(_write_riff_chunk(node) for node in nodes)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _write_riff_chunk(node: Node) -> bytes:
    body = b"".join(map(_write_riff_chunk, node.children)) + node.body
    return node.kind + struct.pack("<I", (len(body) + node.extra_length) % 2**32) + body + bytes(len(body) % 2)


# TIFF: entries of the first image file directory, which is written after the data that they refer to


def parse_tiff(data: bytes) -> list[Node]:
    (start,) = struct.unpack_from("<I", data, 4)
    (count,) = struct.unpack_from("<H", data, start)
    entries = [data[start + 2 + 12 * i :][:12] for i in range(count)]
    return [Node(b"", data[8:]), *(Node(entry[:2], entry[2:]) for entry in entries)]


def write_tiff(nodes: Sequence[Node]) -> bytes:
    data = b"".join(node.body for node in nodes if not node.kind)
    entries = [node.kind + node.body[:10].ljust(10, b"\0") for node in _flat(nodes) if node.kind]
    count = (len(entries) + sum(node.extra_length for node in nodes)) % 2**16
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", count) + b"".join(entries) + bytes(4)


def _flat(nodes: Sequence[Node]) -> list[Node]:
    return [found for node in nodes for found in (node, *_flat(node.children))]


# GIF: blocks of sub-blocks


def parse_gif(data: bytes) -> list[Node]:
    table = 3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0
    nodes, position = [Node(data[: 13 + table])], 13 + table
    while data[position] != 0x3B:
        start = position
        if data[position] == 0x2C:
            local = data[position + 9]
            position += 11 + (3 << (local & 7) + 1 if local & 0x80 else 0)  # descriptor, table, size of a code
        else:
            position += 2
        node = Node(data[start:position])
        while size := data[position]:
            node.children.append(Node(b"sub-block", data[position + 1 : position + 1 + size]))
            position += 1 + size
        nodes.append(node)
        position += 1
    return [*nodes, Node(b"\x3b")]


def write_gif(nodes: Sequence[Node]) -> bytes:
    return b"".join(_write_gif_block(node) for node in nodes)


def _write_gif_block(node: Node) -> bytes:
    if node.kind[:1] == b"s":
        body = node.body[:255]
        return bytes([(len(body) + node.extra_length) % 256]) + body + write_gif(node.children)
    end = b"\0" if node.children or node.kind[:1] in (b"\x21", b"\x2c") else b""
    return node.kind + node.body + write_gif(node.children) + end


# PDF: objects of tokens, and their streams


_OBJECT = re.compile(rb"(\d+) 0 obj\r?\n(.*?)\r?\nendobj\r?\n", re.DOTALL)
_STREAM = re.compile(rb"(.*?)(?:\r?\n)?stream\r?\n(.*)\r?\nendstream", re.DOTALL)
_TOKEN = re.compile(rb"<<|>>|[\[\]]|\((?:\\.|[^()\\])*\)|<[0-9a-fA-F]*>|/?[^\s<>\[\]()/]+", re.DOTALL)
_LENGTH = b"/Length"
_FLATE = [b"/Filter", b"/FlateDecode"]
MAX_INFLATED = 1 << 16


def parse_pdf(data: bytes) -> list[Node]:
    """Parse a file of `tests.pdfs`, or one that PDFium has written."""
    nodes = []
    for number, content in _OBJECT.findall(data):
        found = _STREAM.fullmatch(content)
        tokens = [Node(b"token", token) for token in _TOKEN.findall(found[1] if found else content)]
        nodes.append(Node(number, children=[*tokens, *([Node(b"stream", found[2])] if found else [])]))
    return nodes


def inflate_pdf(nodes: Sequence[Node]) -> None:
    """Replace streams that are only deflated by their contents, so that mutations change these."""
    for node in nodes:
        tokens = [child.body for child in node.children[:-1]]
        index = next((index for index in range(len(tokens)) if tokens[index : index + 2] == _FLATE), None)
        if index is None or b"/DecodeParms" in tokens:
            continue
        with contextlib.suppress(zlib.error):
            inflated = zlib.decompress(node.children[-1].body)
            if len(inflated) <= MAX_INFLATED:
                node.children[-1].body = inflated
                del node.children[index : index + 2]


def write_pdf(nodes: Sequence[Node]) -> bytes:
    objects: dict[int, bytes] = {}
    catalog = 1
    for node in (node for node in nodes if node.kind.isdigit()):
        number = int(node.kind)
        if number in objects:  # a copy
            number = max(objects) + 1
        objects[number] = _write_object(node)
        if any(child.body == b"/Catalog" for child in node.children):
            catalog = number
    return pdf([objects.get(number + 1, b"null") for number in range(max(objects, default=0))], catalog=catalog)


def _write_object(node: Node) -> bytes:
    tokens: list[bytes] = []
    streams = b""
    for child in node.children:
        if child.kind == b"stream":
            streams += b"\nstream\n%b\nendstream" % child.body
            length = len(child.body) + child.extra_length
            for index in (index for index, token in enumerate(tokens[:-1]) if token == _LENGTH):
                tokens[index + 1] = b"%d" % length
        else:
            tokens.append(child.body + b"".join(_write_object(inner) for inner in child.children))
    return b" ".join(tokens) + streams


# Mutations


FORMATS: dict[str, tuple[Callable[[bytes], list[Node]], Write]] = {
    "MP4": (parse_mp4, write_mp4),
    "EBML": (parse_ebml, write_ebml),
    "JPEG": (parse_jpeg, write_jpeg),
    "PNG": (parse_png, write_png),
    "WEBP": (parse_webp, write_webp),
    "TIFF": (parse_tiff, write_tiff),
    "GIF": (parse_gif, write_gif),
    "PDF": (parse_pdf, write_pdf),
}


def parse(format_name: str, data: bytes) -> Structure:
    """Parse a valid file of a format in `FORMATS`."""
    read, write = FORMATS[format_name]
    return Structure(read(data), write)


@st.composite
def mutated_files(draw: st.DrawFn, files: Sequence[Structure]) -> bytes:
    """Draw a valid file with one to four changes of its structure."""
    structure = draw(st.sampled_from(files))
    nodes = copy.deepcopy(list(structure.nodes))
    for _ in range(draw(st.integers(1, 4))):
        _mutate(draw, nodes)
    return structure.write(nodes)[:MAX_FILE_BYTES]


def _node_lists(nodes: list[Node]) -> list[list[Node]]:
    """Return every list of sibling nodes."""
    return [nodes, *(found for node in nodes if node.children for found in _node_lists(node.children))]


def _mutate(draw: st.DrawFn, nodes: list[Node]) -> None:
    siblings = draw(st.sampled_from([found for found in _node_lists(nodes) if found] or [[Node(b"free")]]))
    index = draw(st.integers(0, len(siblings) - 1))
    change = draw(st.sampled_from(["copy", "drop", "move", "nest", "length", "number", "number", "number", "resize"]))
    node = siblings[index]
    if change == "copy":
        siblings[index:index] = [copy.deepcopy(node) for _ in range(draw(st.sampled_from(MAX_COPIES)))]
    elif change == "drop":
        del siblings[index]
    elif change == "move":
        siblings.insert(draw(st.integers(0, len(siblings) - 1)), siblings.pop(index))
    elif change == "nest":
        node.children.append(copy.deepcopy(draw(st.sampled_from(siblings))))
    elif change == "length":
        node.extra_length = draw(st.sampled_from([-8, -1, 1, 8, 255, 2**16, 2**31 - 1, 2**32 - 1]))
    elif change == "number":
        _change_number(draw, node)
    else:
        size = draw(st.sampled_from([0, 1, len(node.body) // 2, len(node.body) + 1, 70_000]))
        node.body = node.body[:size].ljust(size, b"\xff")


def _change_number(draw: st.DrawFn, node: Node) -> None:
    """Replace 1, 2 or 4 bytes of a node, mostly near its beginning, where counts and offsets are."""
    width = draw(st.sampled_from([1, 2, 4]))
    end = max(0, len(node.body) - width)
    start = draw(st.integers(0, min(end, 24)) | st.integers(0, end))
    value = draw(st.sampled_from([edge[:width] for edge in EDGES]) | st.binary(min_size=width, max_size=width))
    node.body = node.body[:start] + value + node.body[start + width :]
