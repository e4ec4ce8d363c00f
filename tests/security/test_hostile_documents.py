"""Documents that cost a renderer gigabytes or minutes, or make it read files. No model runs."""

from __future__ import annotations

import pytest

from benchmarks.hostile_documents import CATALOG, inflating, nested_forms, pdf, stream
from dashinfer_vlm_core.errors import InvalidParameter, MediaTooLarge, MediaUndecodable
from dashinfer_vlm_core.media_workers.pool import is_supported
from dashinfer_vlm_core.testing import scripted_engine
from tests.core.test_preview import decode_png
from tests.pdfs import document, looping
from tests.samples import data_url, image_url
from tests.security.conftest import image

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not is_supported(), reason="worker processes need Linux")]

PART = "messages[0].content[0]"
PAGES = b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>"
PAGE = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 56 56] /Contents 4 0 R /Resources << /XObject << /X 5 0 R >> >> >>"


def huge_image(side: int) -> bytes:
    entries = b"/Type /XObject /Subtype /Image /ColorSpace /DeviceRGB /BitsPerComponent 8 /Width %d /Height %d"
    return pdf([CATALOG, PAGES, PAGE, stream(b"56 0 0 56 0 0 cm /X Do"), stream(b"\0" * 9, entries % (side, side))])


HOSTILE = {
    "a gigabyte of content": lambda: inflating(1 << 30),
    "a gigabyte of content, deflated twice": lambda: inflating(1 << 30, layers=2),
    "3 billion lines": lambda: nested_forms(levels=9, copies=11),
    "an image of 3 gigabytes": lambda: huge_image(32_000),
    "an image of 2 ** 62 pixels": lambda: huge_image(2**31 - 1),
    "a million pages": lambda: pdf([CATALOG, b"<< /Type /Pages /Kids [3 0 R] /Count 1000000 >>", b"null"]),
    "a negative number of pages": lambda: pdf([CATALOG, b"<< /Type /Pages /Kids [] /Count -1 >>"]),
    "a huge page": lambda: document("text", size=(14_400, 14_400)),
    "a dictionary of 100,000 levels": lambda: pdf([CATALOG, b"<< /A " * 100_000 + b">> " * 100_000]),
    "arrays of 100,000 levels": lambda: pdf([CATALOG, b"[" * 100_000]),
    **{name: lambda file=file: file for name, file in looping().items()},
}


@pytest.fixture(scope="module")
def engine(tiny_checkpoint):
    limits = {"image_decode_timeout": 3, "video_decode_timeout": 3, "media_worker_memory_mib": 256}
    with scripted_engine("Fine.", model=str(tiny_checkpoint), limits=limits, media_workers=2) as engine:
        yield engine


def request(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


def file(data, **options):
    return {"type": "file", "file": {"file_data": data_url(data, "application/pdf"), **options}}


def check_error(error):
    assert error.param.startswith(PART)
    assert "save it again" in error.message.lower() or "with `" in error.message


@pytest.mark.parametrize("build", HOSTILE.values(), ids=HOSTILE)
def test_security_41_hostile_document_is_rendered_or_rejected_in_time(engine, build):
    try:
        preview = engine.preview(request(file(build(), max_pixels=84 * 84)))
    except (MediaTooLarge, MediaUndecodable, InvalidParameter) as error:
        check_error(error)
    else:
        assert [0 < item.tokens <= 9 for item in preview.items] == [True]
    assert engine.preview(request(image(image_url()))).items


def test_security_41_form_that_needs_another_program_shows_its_fallback_page(engine):
    """XFA forms have an ordinary page for other programs, which asks for one that supports them."""
    xfa = pdf(
        [
            b"<< /Type /Catalog /Pages 2 0 R /AcroForm << /Fields [] /XFA [(template) 5 0 R] >> >>",
            PAGES,
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 84 56] /Contents 4 0 R >>",
            stream(b"1 0 0 rg 0 0 84 56 re f"),
            stream(b"<template xmlns='http://www.xfa.org/schema/xfa-template/3.3/'/>"),
        ]
    )
    (item,) = engine.preview(request(file(xfa))).items
    red = decode_png(item.frames[0])
    assert red[..., 0].min() > 250
    assert red[..., 1:].max() < 5


def test_security_41_page_cannot_show_files_of_this_machine(engine, tmp_path):
    """A stream can name a file as its data."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"0 0 1 rg 0 0 56 56 re f")
    content = b"<< /Length 0 /F (%b) /FFilter [] >>\nstream\n\nendstream" % str(secret).encode()
    reading, empty = (pdf([CATALOG, PAGES, PAGE, each]) for each in (content, stream(b"")))
    (seen,), (blank,) = (engine.preview(request(file(data, max_pixels=84 * 84))).items for data in (reading, empty))
    assert seen.digest == blank.digest
