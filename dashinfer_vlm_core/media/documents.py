"""Documents that were read: the output of `pdf`, without PDFium."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from ..config.limits import Limits
from ..errors import InvalidParameter, MediaTooLarge, MediaUndecodable
from ..installation import installed_version
from ..protocol import DocumentPage, DocumentPart, MediaPart

DEFAULT_DPI = 144
MAX_PAGES = 1000
"""Maximum number of pages of a document of which only the text is read, or whose pages are for separate requests."""
MAX_POINTS = 14_400
"""Maximum side of a page: PDF's own limit, 200 inches."""
POINTS_PER_INCH = 72


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """A page of a document.

    Attributes:
        number: from 1 on.
        width: in points, 1/72 inch.
        height: in points.
        text: its text layer, if it was read.
        error: why it cannot be read; the size is then meaningless.
    """

    number: int
    width: float
    height: float
    text: str = field(default="", repr=False)
    error: InvalidParameter | MediaTooLarge | MediaUndecodable | None = None

    def size(self, dpi: int) -> tuple[int, int]:
        """Return height and width in pixels."""
        height, width = (max(2, round(side * dpi / POINTS_PER_INCH)) for side in (self.height, self.width))
        return height, width


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A document that was read.

    Attributes:
        file: the encoded document.
        pages: the selected pages, in order.
    """

    file: bytes = field(repr=False)
    pages: tuple[Page, ...]

    def images(self, part: DocumentPart) -> list[MediaPart]:
        """Return the images of the pages, not rendered yet."""
        renderer = installed_version("pypdfium2").encode()
        digest = hashlib.sha256(renderer + hashlib.sha256(self.file).digest()).hexdigest()
        return [
            MediaPart(
                kind="image",
                path=part.path,
                page=DocumentPage(
                    file=self.file,
                    file_digest=digest,
                    number=page.number,
                    size=page.size(part.dpi or DEFAULT_DPI),
                    dpi=part.dpi,
                    password=part.password,
                ),
                max_pixels=part.max_pixels,
                url_field=part.url_field,
            )
            for page in self.pages
        ]


def check_pages(count: int, part: DocumentPart, limits: Limits) -> None:
    """Check the number of selected pages of documents; `part` is the last document that they belong to.

    Raises:
        MediaTooLarge: there are more than are allowed.
    """
    is_read_only = part.render == "text" or part.split
    limit = MAX_PAGES if is_read_only else limits.document_pages
    if count > limit:
        verb = "read" if is_read_only else "rendered"
        raise MediaTooLarge(
            f"At most {limit} pages can be {verb} for a request, got {count}. Select fewer with"
            f" `{part.options_path}.pages`.",
            param=part.path,
        )
