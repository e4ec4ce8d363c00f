"""PDF files of many programs, those of pypdf's tests, with a changed structure.

`scripts/test --interop tests/interop/test_pdf_files.py --hypothesis-profile=nightly` runs 5,000 other cases.
"""

from __future__ import annotations

import io

import pypdfium2
import pytest
from hypothesis import given, settings

from benchmarks.environments import SetupMissing
from dashinfer_vlm_core.media_workers.pool import is_supported
from tests.fuzz.documents import check, document_engine, request
from tests.fuzz.structures import inflate_pdf, mutated_files, parse
from tests.interop import interpreters

pytestmark = [
    pytest.mark.interop,
    pytest.mark.timeout(3 * 3600),
    pytest.mark.skipif(not is_supported(), reason="worker processes need Linux"),
]

CASES = 5 * settings.default.max_examples // 2
MAX_BYTES = 1 << 17
WITHOUT_SECURITY = 3
"""A flag of PDFium's: the file is not encrypted."""


@pytest.fixture(scope="module")
def engine(tiny_checkpoint):
    with document_engine(tiny_checkpoint) as engine:
        yield engine


@pytest.fixture(scope="module")
def structures():
    try:
        folder = interpreters.pdfs()
    except SetupMissing as error:
        pytest.skip(f"PDF files are not available: {error}")
    files = [rewritten(path.read_bytes()) for path in sorted(folder.rglob("*.pdf"))]
    found = [parse("PDF", file) for file in files if 0 < len(file) <= MAX_BYTES]
    for structure in found:
        inflate_pdf(structure.nodes)
    return found


def rewritten(file):
    """Return a file as PDFium writes it: without compressed objects; empty if it requires a password."""
    copy = io.BytesIO()
    try:
        with pypdfium2.PdfDocument(file) as document:
            document.save(copy, flags=WITHOUT_SECURITY)
    except pypdfium2.PdfiumError:
        return b""
    return copy.getvalue()


def test_unchanged_files_are_rendered(engine, structures):
    assert len(structures) > 40
    for structure in structures:
        assert engine.preview(request(structure.write(structure.nodes), pages="1", max_pixels=84 * 84)).items


def test_file_with_changed_structure_is_rendered_or_rejected(engine, structures):
    @settings(max_examples=CASES)
    @given(mutated_files(structures))
    def run(file):
        check(engine, file, pages="1")

    run()
