"""DocumentPart: a PDF that a request refers to, before it is fetched."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field

from .media_part import join_path

MAX_PAGES_CHARACTERS = 512

RenderMode: TypeAlias = Literal["image", "text", "both"]
"""What the model receives of a page: its image, its text layer, or both."""

_RANGES = re.compile(r"[1-9][0-9]{0,6}(-([1-9][0-9]{0,6})?)?(,[1-9][0-9]{0,6}(-([1-9][0-9]{0,6})?)?)*")


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentPart:
    """A PDF that a message refers to, not fetched yet.

    Attributes:
        path: its path in the request, such as `messages[0].content[1]`.
        url: the source, not empty and not validated otherwise.
        kind: distinguishes it from a `MediaPart`.
        pages: the selected pages, such as "1-3,7"; all if empty.
        render: what the model receives of a page.
        dpi: pixels per inch of a page, within the limits of images; None if the request sets none.
        max_pixels: maximum number of pixels of a page, at least 1.
        password: opens an encrypted document.
        split: whether each page is for a request of its own. Then one that cannot be read does not fail the others, and
            errors count pages from 0.
        url_field: the field of the part with its URL.
    """

    path: str
    url: str
    kind: Literal["document"] = "document"
    pages: str = ""
    render: RenderMode = "both"
    dpi: int | None = None
    max_pixels: int | None = None
    password: str | None = field(default=None, repr=False)
    split: bool = False
    url_field: str = field(default="file.file_data", compare=False)

    @property
    def subject(self) -> Literal["document"]:
        """What it is, as errors name it; see `MediaPart.subject`."""
        return self.kind

    @property
    def options_path(self) -> str:
        """The path of the object that has the options."""
        return join_path(self.path, self.url_field.partition(".")[0])

    def selected(self, count: int) -> Iterator[int]:
        """Yield the numbers of the selected pages of a document that has `count` pages, in ascending order.

        Raises:
            ValueError: there is no such page; the message is its number.
        """
        ranges = list(page_ranges(self.pages or "1-", count))
        for first, last in ranges:
            if max(first, last) > count:
                raise ValueError(str(max(first, last)))
        reached = 0
        for first, last in sorted(ranges):
            yield from range(max(first, reached + 1), last + 1)
            reached = max(reached, last)


def page_ranges(text: str, count: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last page of each range of a text such as "1-3,7,9-", whose end is open."""
    for pages in text.split(","):
        first, dash, last = pages.partition("-")
        yield int(first), int(last or (max(count, int(first)) if dash else first))


def _check_ranges(text: str) -> str:
    text = text.replace(" ", "")
    if not _RANGES.fullmatch(text) or any(first > last for first, last in page_ranges(text, 0)):
        raise ValueError('must be page numbers and ranges from 1 on, such as "1-3,7"')
    return text


PageRanges: TypeAlias = Annotated[str, Field(max_length=MAX_PAGES_CHARACTERS), AfterValidator(_check_ranges)]
