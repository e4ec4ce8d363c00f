"""Documents with a changed structure, random damage or random drawings, through media workers to patches."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.hostile_documents import pdf, stream
from dashinfer_vlm_core.config import Limits
from dashinfer_vlm_core.media_workers.pool import is_supported
from dashinfer_vlm_core.testing import scripted_engine
from tests.fuzz.documents import check, document_engine, request
from tests.fuzz.mutations import damaged_bytes
from tests.fuzz.structures import mutated_files, parse
from tests.pdfs import document
from tests.samples import encode, noise
from tests.waiting import HANG

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(6 * 3600),
    pytest.mark.skipif(not is_supported(), reason="worker processes need Linux"),
]

SHARE = settings.default.max_examples
PIXELS = noise(8, 8).tobytes()
IMAGE = b"/Type /XObject /Subtype /Image /Width 8 /Height 8 /ColorSpace /DeviceRGB /BitsPerComponent 8"
FIELD = b"<< /Type /Annot /Subtype /Widget /FT /Tx /T (a) /V (b) /Rect [9 9 50 20] /DA (/F 9 Tf) /P 3 0 R >>"
CMAP = b"1 beginbfchar <41> <D83DDE00> endbfchar"


def page(*objects: bytes, resources: bytes = b"", entries: bytes = b"", catalog: bytes = b"") -> bytes:
    """Return a document with a page whose content is object 4."""
    return pdf(
        [
            b"<< /Type /Catalog /Pages 2 0 R %b >>" % catalog,
            b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 84 56] /Contents 4 0 R /Resources << %b >> %b >>"
            % (resources, entries),
            *objects,
        ]
    )


FILES = [
    document("Two words", "A second page", size=(84, 56)),
    document("Unknown", size=(84, 56), font="Unknown", paint="1 0 0 rg 0 0 40 40 re f"),
    page(stream(b"q 40 0 0 40 0 0 cm /X Do Q"), stream(PIXELS, IMAGE), resources=b"/XObject << /X 5 0 R >>"),
    page(
        stream(zlib.compress(b"q 40 0 0 40 0 0 cm /X Do Q"), b"/Filter /FlateDecode"),
        stream(zlib.compress(PIXELS), IMAGE + b" /Filter /FlateDecode /DecodeParms << /Predictor 1 /Columns 8 >>"),
        resources=b"/XObject << /X 5 0 R >>",
    ),
    page(
        stream(b"40 0 0 40 0 0 cm /X Do"),
        stream(encode(noise(8, 8), "JPEG"), IMAGE + b" /Filter /DCTDecode"),
        resources=b"/XObject << /X 5 0 R >>",
    ),
    page(
        stream(b"/P cs /S scn 0 0 84 56 re f /G sh"),
        b"<< /ShadingType 2 /ColorSpace /DeviceRGB /Coords [0 0 84 56] /Function 6 0 R /Extend [true true] >>",
        b"<< /FunctionType 2 /Domain [0 1] /C0 [1 0 0] /C1 [0 0 1] /N 1 >>",
        stream(b"1 0 0 rg 0 0 2 2 re f", b"/PatternType 1 /PaintType 1 /TilingType 1 /BBox [0 0 4 4] /XStep 4"),
        resources=b"/ColorSpace << /P /Pattern >> /Pattern << /S 7 0 R >> /Shading << /G 5 0 R >>",
    ),
    page(
        stream(b"BT /F 9 Tf 9 30 Td <4142> Tj ET"),
        b"<< /Type /Font /Subtype /Type0 /Encoding /Identity-H /DescendantFonts [6 0 R] /ToUnicode 7 0 R >>",
        b"<< /Type /Font /Subtype /CIDFontType2 /CIDSystemInfo << /Registry (A) /Ordering (B) >> /W [0 [9]] >>",
        stream(CMAP),
        resources=b"/Font << /F 5 0 R >>",
    ),
    page(
        stream(b"q Q"), FIELD, entries=b"/Annots [5 0 R] /Rotate 90",
        catalog=b"/AcroForm << /Fields [5 0 R] /DA (/F 9 Tf) >>",
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def engine(tiny_checkpoint):
    with document_engine(tiny_checkpoint) as engine:
        yield engine


@settings(max_examples=8 * SHARE)
@given(mutated_files([parse("PDF", file) for file in FILES]))
def test_document_with_changed_structure_is_rendered_or_rejected(engine, file):
    check(engine, file)


@settings(max_examples=2 * SHARE)
@given(damaged_bytes(FILES))
def test_damaged_document_is_rendered_or_rejected(engine, file):
    check(engine, file)


NUMBERS = st.sampled_from([0, 1, -1, 0.5, 1e-9, 84, 1e9, -1e9, 2**31, 2**63]) | st.integers(-100, 100)
OPERATORS = {"m": 2, "l": 2, "c": 6, "re": 4, "h": 0, "f": 0, "S": 0, "B*": 0, "W n": 0, "q": 0, "Q": 0,
             "cm": 6, "w": 1, "rg": 3, "K": 4, "d0": 2, "i": 1, "M": 1, "J": 1, "BT": 0, "ET": 0, "Tm": 6,
             "TL": 1, "T*": 0, "Tr": 1, "/F 9 Tf": 0, "(text) Tj": 0, "[(a) 9 (b)] TJ": 0, "/X Do": 0,
             "/G gs": 0, "[2 1] 0 d": 0}  # fmt: skip


@st.composite
def drawings(draw):
    """Draw the content of a page: operators of PDF with numbers, most of them valid."""
    chosen = draw(st.lists(st.sampled_from(sorted(OPERATORS)), min_size=1, max_size=60))
    lines = [" ".join([*(f"{draw(NUMBERS):.10g}" for _ in range(OPERATORS[name])), name]) for name in chosen]
    return "\n".join(lines * draw(st.sampled_from([1, 1, 1, 50])))


@settings(max_examples=3 * SHARE)
@given(drawings(), st.tuples(NUMBERS, NUMBERS))
def test_random_drawing_is_rendered_or_rejected(engine, drawing, size):
    check(engine, document("text", size=size, paint=drawing))


def test_unchanged_documents_are_rendered(tiny_checkpoint):
    limits = Limits(image_decode_timeout=HANG, video_decode_timeout=HANG)
    with scripted_engine("Never asked.", model=str(tiny_checkpoint), limits=limits) as engine:
        for file in FILES:
            structure = parse("PDF", file)
            assert engine.preview(request(structure.write(structure.nodes))).items
