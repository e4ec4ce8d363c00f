"""OCR responses, in the format of Mistral's API. `total_pages`, `error` and `OcrChunk` are additions."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict


class _Model(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True)


class OcrDimensions(_Model):
    """The size in pixels of a page as the model received it. An image has 72 pixels per inch."""

    dpi: int
    height: int
    width: int


class OcrImage(_Model):
    """The image of a page, as the model received it. Coordinates are pixels; `image_base64` is a data: URL."""

    id: str
    top_left_x: int
    top_left_y: int
    bottom_right_x: int
    bottom_right_y: int
    image_base64: str


class OcrError(_Model):
    """Why a page has no text, or is incomplete; as in `ErrorObject` of the server."""

    message: str
    param: str | None
    code: str | None


class OcrPage(_Model):
    """A page.

    Attributes:
        index: its number in the document, from 0 on.
        markdown: its text; empty if it failed.
        images: its image, if it was requested.
        dimensions: None if the page failed before its size was known.
        error: why it failed, or is incomplete.
    """

    index: int
    markdown: str
    images: tuple[OcrImage, ...] = ()
    dimensions: OcrDimensions | None = None
    error: OcrError | None = None


class OcrUsage(_Model):
    """What was processed. Pages that failed do not count; the size of an image is not known."""

    pages_processed: int
    doc_size_bytes: int | None


class OcrChunk(_Model):
    """An event of a stream: one page, in the order of the document.

    Attributes:
        total_pages: how many pages the stream will have.
        usage_info: the usage up to this page.
    """

    object: Literal["ocr.page"] = "ocr.page"
    model: str
    page: OcrPage
    total_pages: int
    usage_info: OcrUsage


class OcrResponse(_Model):
    """The response to an OCR request."""

    pages: tuple[OcrPage, ...]
    model: str
    document_annotation: None = None
    usage_info: OcrUsage
