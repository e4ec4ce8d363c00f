"""Small PDF files, written by hand."""

from __future__ import annotations

import hashlib

import pypdfium2
from PIL import Image

from benchmarks.hostile_documents import CATALOG, one_page, pdf, stream


def document(*pages: str, size: tuple[float, float] = (280, 392), font: str = "Helvetica", paint: str = "") -> bytes:
    """Return a document with a page for each text, which can have several lines; `paint` is drawn on every page."""
    first = 4
    kids = " ".join(f"{first + 2 * index} 0 R" for index in range(len(pages)))
    objects = [
        CATALOG,
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
        f"<< /Type /Font /Subtype /TrueType /BaseFont /{font} >>".encode(),
    ]
    for index, text in enumerate(pages):
        box = f"/MediaBox [0 0 {size[0]:.10g} {size[1]:.10g}] /Resources << /Font << /F 3 0 R >> >>"
        objects.append(f"<< /Type /Page /Parent 2 0 R {box} /Contents {first + 2 * index + 1} 0 R >>".encode())
        lines = " ".join(f"({_escaped(line)}) '" for line in text.split("\n"))
        objects.append(stream(f"{paint}\nBT /F 12 Tf 14 TL 10 {size[1] - 20:.10g} Td {lines} ET".encode("latin-1")))
    return pdf(objects)


def encrypted(password: str) -> bytes:
    """Return a document of an empty page that this password opens: the standard security handler's revision 2."""
    identifier = bytes(16)
    owner = _rc4(hashlib.md5(_padded(password)).digest()[:5], _padded(password))
    permissions = b"\xfc\xff\xff\xff"
    key = hashlib.md5(_padded(password) + owner + permissions + identifier).digest()[:5]
    user = _rc4(key, _PADDING)
    handler = b"<< /Filter /Standard /V 1 /R 2 /O <%b> /U <%b> /P -4 >>" % (owner.hex().encode(), user.hex().encode())
    objects = [
        CATALOG,
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 56 56] >>",
        handler,
    ]
    return pdf(objects, b"/Encrypt 4 0 R /ID [<%b> <%b>]" % ((identifier.hex().encode(),) * 2))


_PADDING = bytes.fromhex("28bf4e5e4e758a4164004e56fffa01082e2e00b6d0683e802f0ca9fe6453697a")


def _padded(password: str) -> bytes:
    return (password.encode() + _PADDING)[:32]


def _rc4(key: bytes, data: bytes) -> bytes:
    state = list(range(256))
    j = 0
    for i in range(256):
        j = (j + state[i] + key[i % len(key)]) % 256
        state[i], state[j] = state[j], state[i]
    output = bytearray()
    i = j = 0
    for byte in data:
        i = (i + 1) % 256
        j = (j + state[i]) % 256
        state[i], state[j] = state[j], state[i]
        output.append(byte ^ state[(state[i] + state[j]) % 256])
    return bytes(output)


def looping() -> dict[str, bytes]:
    """Return documents in which objects refer to each other in a circle."""
    form = b"/Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources << /XObject << /X 5 0 R >> >>"
    drawing = b"/Contents 4 0 R /Resources << /XObject << /X 5 0 R >> >>"
    return {
        "a page tree that contains itself": pdf([CATALOG, b"<< /Type /Pages /Kids [2 0 R] /Count 1 >>"]),
        "a form that draws itself": pdf([CATALOG, *one_page(drawing), stream(b"/X Do"), stream(b"/X Do", form)]),
        "a length that is its own stream": pdf(
            [CATALOG, *one_page(b"/Contents 4 0 R"), b"<< /Length 4 0 R >>\nstream\nq Q\nendstream"]
        ),
        "a page that is its own parent": pdf(
            [CATALOG, b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>", b"<< /Type /Page /Parent 3 0 R >>"]
        ),
        "a table of objects before itself": pdf([CATALOG, *one_page(b"")], b"/Prev 9"),
        "a content of contents": pdf([CATALOG, *one_page(b"/Contents 4 0 R"), b"[4 0 R 4 0 R]"]),
    }


def rendered(data: bytes, width: int, height: int) -> Image.Image:
    """Render the first page at a size in pixels."""
    with pypdfium2.PdfDocument(data) as opened:
        bitmap = pypdfium2.PdfBitmap.new_native(width, height, pypdfium2.raw.FPDFBitmap_BGR)
        bitmap.fill_rect((255, 255, 255, 255), 0, 0, width, height)
        pypdfium2.raw.FPDF_RenderPageBitmap(bitmap, opened[0], 0, 0, width, height, 0, pypdfium2.raw.FPDF_ANNOT)
        return bitmap.to_pil()


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)")
