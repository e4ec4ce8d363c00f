"""PDF files: the sizes and texts of pages, and pages as images, by PDFium.

Only media workers import this module: PDFium may crash on a damaged file, and it may be used by one thread only.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pypdfium2 as pdfium
import pypdfium2.raw
from PIL import Image as PILImage

from ..config.limits import Limits
from ..errors import InvalidParameter, MediaTooLarge, MediaUndecodable
from ..protocol import DocumentPart, MediaPart
from .documents import MAX_POINTS, Page, check_pages

_ALWAYS_REPLACED = ("Courier", "Helvetica", "Times", "Symbol", "ZapfDingbats")
"""The beginnings of the names of PDF's standard fonts, which PDFium has replacements of."""
_MAX_NAME = 60
_MAX_NAMES = 8
_MAX_LOGGED = 1000

logger: logging.Logger = logging.getLogger(__name__)
logging.getLogger("pypdfium2").setLevel(logging.ERROR)  # it warns about forms that it shows in another way


class _FontLog(pdfium.PdfSysfontBase):  # type: ignore[misc]  # the library has no types
    """Logs the names of fonts that are neither in a document nor installed, each once in a process."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[str, None] = {}
        self._logged: set[str] = set()

    def MapFont(self, _: Any, *arguments: Any) -> Any:  # noqa: N802  PDFium's name
        found = self.default.MapFont(self.default, *arguments)
        name = ctypes.string_at(arguments[4])[:_MAX_NAME].decode("ascii", "replace")
        if not found and not name.startswith(_ALWAYS_REPLACED) and len(self._logged) < _MAX_LOGGED:
            self._found[name] = None
        return found

    @contextlib.contextmanager
    def log(self) -> Iterator[None]:
        """Log the fonts that pages need which are loaded in this context."""
        self._found.clear()
        yield
        names = [name for name in self._found if name not in self._logged][:_MAX_NAMES]
        self._logged.update(names)
        if names:
            logger.warning("Fonts that are not in the document were replaced: %s", ", ".join(names))


_FONTS = _FontLog()
_FONTS.setup()


def read_pages(part: DocumentPart, data: bytes, limits: Limits) -> list[Page]:
    """Read the selected pages of a document: their sizes, and if the model receives them, their text layers.

    Raises:
        MediaUndecodable: it is not a complete PDF, or has no pages.
        MediaTooLarge: too many pages are selected, or a page is too large or has too much text.
        InvalidParameter: its password is missing or wrong, or it has no such page.
    """
    with _FONTS.log(), _open(data, part.path, part.options_path, part.password) as document:
        pages: list[Page] = []
        characters = limits.document_pages * limits.document_page_text
        for number in _select(part, len(document), limits):
            pages.append(_read(document, number, part, limits))
            characters -= len(pages[-1].text)
            if characters < 0:
                raise _text_error(f"the pages up to {number}", limits.document_pages * limits.document_page_text, part)
    return pages


def render_page(part: MediaPart, data: bytes, size: tuple[int, int]) -> PILImage.Image:
    """Render the page of a part at a size, (height, width), with its annotations and form fields.

    Raises:
        MediaUndecodable: the page is damaged.
    """
    assert part.page is not None
    height, width = size
    with (
        _FONTS.log(),
        _open(data, part.path, part.options_path, part.page.password) as document,
        _load(document, part.page.number, part.path) as page,
    ):
        bitmap = pdfium.PdfBitmap.new_native(width, height, pypdfium2.raw.FPDFBitmap_BGR)
        bitmap.fill_rect((255, 255, 255, 255), 0, 0, width, height)
        arguments = (bitmap, page, 0, 0, width, height, 0, pypdfium2.raw.FPDF_ANNOT)
        pypdfium2.raw.FPDF_RenderPageBitmap(*arguments)
        if document.formenv:
            pypdfium2.raw.FPDF_FFLDraw(document.formenv, *arguments)
        image: PILImage.Image = bitmap.to_pil()
        bitmap.close()
        return image


@contextlib.contextmanager
def _open(data: bytes, path: str, options_path: str, password: str | None) -> Iterator[Any]:
    # PDFium has no error for a document without pages: this one would be that of an earlier document.
    pypdfium2.raw.FPDF_LoadMemDocument(b"", 0, None)
    try:
        document = pdfium.PdfDocument(data, password=password)
    except pdfium.PdfiumError as error:
        if error.err_code == pypdfium2.raw.FPDF_ERR_PASSWORD:
            raise _password_error(options_path, password) from None
        if error.err_code == pypdfium2.raw.FPDF_ERR_SECURITY:
            raise MediaUndecodable(
                "The document is encrypted in a way that is not supported. Save it without encryption.", param=path
            ) from None
        raise MediaUndecodable(
            "This is not a complete PDF with at least one page. Save it again.", param=path
        ) from None
    with document:
        with contextlib.suppress(pdfium.PdfiumError):  # it is shown without its fields
            document.init_forms()
        yield document


def _password_error(options_path: str, password: str | None) -> InvalidParameter:
    param = f"{options_path}.password"
    if password is None:
        return InvalidParameter(f"The document is encrypted. Send its password as `{param}`.", param=param)
    return InvalidParameter(f"`{param}` does not open the document. Check it.", param=param)


def _select(part: DocumentPart, count: int, limits: Limits) -> Sequence[int]:
    try:
        numbers = list(part.selected(count))
    except ValueError as error:
        param = f"{part.options_path}.pages"
        first = 0 if part.split else 1
        raise InvalidParameter(
            f"`{param}` selects page {int(str(error)) - 1 + first}, but the document has {count}. Choose from"
            f" {first} to {count - 1 + first}.",
            param=param,
        ) from None
    check_pages(len(numbers), part, limits)
    return numbers


def _read(document: Any, number: int, part: DocumentPart, limits: Limits) -> Page:
    try:
        return _read_page(document, number, part, limits)
    except (MediaTooLarge, MediaUndecodable) as error:
        if not part.split:
            raise
        return Page(number=number, width=1, height=1, error=error)


def _read_page(document: Any, number: int, part: DocumentPart, limits: Limits) -> Page:
    with _damaged_page(number, part.path):
        size = document.get_page_size(number - 1)
    width, height = _checked_size(size, number, part.path)
    text = ""
    if part.render != "image":  # loading a page interprets its content
        with _load(document, number, part.path) as page:
            text = _text(page, number, limits, part)
    return Page(number=number, width=width, height=height, text=text)


@contextlib.contextmanager
def _damaged_page(number: int, path: str) -> Iterator[None]:
    try:
        yield
    except pdfium.PdfiumError:
        raise MediaUndecodable(
            f"Page {number} of the document is damaged. Save it again, or leave the page out with `pages`.", param=path
        ) from None


@contextlib.contextmanager
def _load(document: Any, number: int, path: str) -> Iterator[Any]:
    with _damaged_page(number, path):
        page = document[number - 1]
        try:
            yield page
        finally:
            page.close()


def _checked_size(size: tuple[float, float], number: int, path: str) -> tuple[float, float]:
    width, height = size
    if not (0 < width <= MAX_POINTS and 0 < height <= MAX_POINTS):
        raise MediaTooLarge(
            f"Page {number} of the document has {width:g} x {height:g} points. Its sides must be above 0, and at most"
            f" {MAX_POINTS} points: change its size, or leave it out with `pages`.",
            param=path,
        )
    return width, height


def _text(page: Any, number: int, limits: Limits, part: DocumentPart) -> str:
    text_page = page.get_textpage()
    if text_page.count_chars() > limits.document_page_text:
        raise _text_error(f"page {number}", limits.document_page_text, part)
    text: str = text_page.get_text_bounded()
    text_page.close()
    return text


def _text_error(pages: str, limit: int, part: DocumentPart) -> MediaTooLarge:
    return MediaTooLarge(
        f"The text of {pages} of the document has more than {limit} characters. Select fewer pages with `pages`, or set"
        ' `render` to "image".',
        param=part.path,
    )
