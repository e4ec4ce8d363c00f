"""PDF files of a few kilobytes that cost a renderer gigabytes of memory or many seconds, written object by object."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

CATALOG = b"<< /Type /Catalog /Pages 2 0 R >>"


def pdf(objects: Sequence[bytes], trailer: bytes = b"", *, catalog: int = 1) -> bytes:
    """Return a file with these objects, numbered from 1 on, one of which is the catalog."""
    file = bytearray(b"%PDF-1.7\n")
    offsets = []
    for number, content in enumerate(objects, 1):
        offsets.append(len(file))
        file += b"%d 0 obj\n%b\nendobj\n" % (number, content)
    start = len(file)
    file += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    file += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    file += b"trailer\n<< /Size %d /Root %d 0 R %b >>\nstartxref\n%d\n%%%%EOF\n" % (
        len(objects) + 1, catalog, trailer, start,
    )  # fmt: skip
    return bytes(file)


def stream(data: bytes, entries: bytes = b"") -> bytes:
    return b"<< %b /Length %d >>\nstream\n%b\nendstream" % (entries, len(data), data)


def one_page(entries: bytes) -> list[bytes]:
    """Return objects 2 and 3: a page with these entries, and the tree of pages."""
    page = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 56 56] %b >>" % entries
    return [b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>", page]


def inflating(size: int, layers: int = 1) -> bytes:
    """Return a document whose page has `size` bytes of content, deflated a number of times."""
    data = b" " * min(size, 1 << 24)
    compressor = zlib.compressobj(9)
    packed = b"".join(compressor.compress(data) for _ in range(max(1, size // len(data)))) + compressor.flush()
    for _ in range(layers - 1):
        packed = zlib.compress(packed, 9)
    content = stream(packed, b"/Filter [%b]" % (b"/FlateDecode " * layers))
    return pdf([CATALOG, *one_page(b"/Contents 4 0 R"), content])


def nested_forms(levels: int, copies: int) -> bytes:
    """Return a document whose page draws `copies ** levels` lines through forms in forms."""
    forms = [
        stream(
            b"/X Do " * copies,
            b"/Type /XObject /Subtype /Form /BBox [0 0 56 56] /Resources << /XObject << /X %d 0 R >> >>" % (6 + level),
        )
        for level in range(levels)
    ]
    drawing = b"/Contents 4 0 R /Resources << /XObject << /X 5 0 R >> >>"
    last = stream(b"0 0 m 56 56 l S", b"/Type /XObject /Subtype /Form /BBox [0 0 56 56]")
    return pdf([CATALOG, *one_page(drawing), stream(b"/X Do"), *forms, last])
