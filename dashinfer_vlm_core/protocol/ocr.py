"""OCR requests, in the format of Mistral's API: a document or an image, whose pages become Markdown."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from .base import Array, Count, Label, Name, RequestModel, StringOrArray, StringOrObject, Text
from .body import CheckedBody
from .fields import RejectedFields
from .request import DEFAULT_MODEL
from .sources import MAX_DPI, FileSource, ImageURL
from .validation_errors import invalid, renamed_errors, unsupported

MAX_INDICES = 1000
_MAX_INDEX = 999_999

_NO_ANNOTATIONS = "Send the Markdown to /v1/chat/completions with a `response_format`."
_NO_FIGURES = "Figures are not cut out of pages. Remove it."
_NO_LAYOUT = "Remove it: pages are returned as Markdown only."

_REJECTED: RejectedFields = {
    "bbox_annotation_format": ((), _NO_ANNOTATIONS),
    "confidence_scores_granularity": ((), _NO_LAYOUT),
    "document_annotation_format": ((), _NO_ANNOTATIONS),
    "document_annotation_prompt": ((), _NO_ANNOTATIONS),
    "extract_footer": ((False,), _NO_LAYOUT),
    "extract_header": ((False,), _NO_LAYOUT),
    "image_limit": ((), _NO_FIGURES),
    "image_min_size": ((), _NO_FIGURES),
    "include_blocks": ((False,), _NO_LAYOUT),
    "table_format": ((), "The model chooses the format of tables. Remove it."),
}

_PDF_OPTIONS = frozenset({"dpi", "max_pixels", "password"})
_PDF_URL = "data:application/pdf"
_RANGES = re.compile(r"[0-9]{1,6}(-[0-9]{1,6})?(,[0-9]{1,6}(-[0-9]{1,6})?)*")
_PART = "messages[0].content[0]"
_RENAMES = (
    (f"{_PART}.file.file_url", "document.document_url"),
    (f"{_PART}.file.pages", "pages"),
    (f"{_PART}.file.filename", "document.document_name"),
    (f"{_PART}.file", "document"),
    (_PART, "document"),
    ("messages", "document"),
)


def _check_ranges(text: str) -> str:
    text = text.replace(" ", "")
    ranges = [pages.partition("-") for pages in text.split(",")]
    if not _RANGES.fullmatch(text) or any(last and int(first) > int(last) for first, _, last in ranges):
        raise ValueError('must be page numbers and ranges from 0 on, such as "0-2,6"')
    return text


_Ranges = Annotated[str, Field(max_length=512), AfterValidator(_check_ranges)]
_Indices = Annotated[Array[Annotated[int, Field(ge=0, le=_MAX_INDEX)]], Field(min_length=1, max_length=MAX_INDICES)]


class OcrDocument(RequestModel):
    """The document of an OCR request: a PDF or an image.

    `dpi`, `max_pixels` and `password` are those of a PDF in a chat request.
    """

    type: Literal["document_url", "image_url", "file"] | None = None
    document_url: Text | None = None
    document_name: Label | None = None
    image_url: StringOrObject[Text, ImageURL] | None = None
    file_id: Text | None = None
    dpi: Annotated[int, Field(ge=1, le=MAX_DPI)] | None = None
    max_pixels: Count | None = None
    password: Label | None = Field(default=None, repr=False)

    def check(self) -> None:
        if self.file_id is not None:
            raise unsupported("document.file_id", "names a stored file, but files are not stored. Send `document_url`.")
        if (self.document_url is None) == (self.image_url is None):
            raise invalid("document", "must have either a `document_url` or an `image_url`.")
        if file := self._file:
            file.check(
                "document", f"document.{'image_url' if self.document_url is None else 'document_url'}", optional=False
            )
            if file.kind == "video":
                raise unsupported("document.document_url", "is a video. Send a PDF or an image.")
        elif given := self.model_fields_set & _PDF_OPTIONS:
            raise unsupported(f"document.{min(given)}", "is not available for an image. Remove it.")

    def content_part(self) -> dict[str, Any]:
        """Return it as a content part of a chat request."""
        if file := self._file:
            return {"type": "file", "file": file}
        return {"type": "image_url", "image_url": self.image_url}

    @property
    def _file(self) -> FileSource | None:
        url = self.image_url if self.document_url is None else self.document_url
        if not isinstance(url, str) or (self.document_url is None and not url.startswith(_PDF_URL)):
            return None
        options = {name: getattr(self, name) for name in sorted(_PDF_OPTIONS)}
        return FileSource(file_url=url, filename=self.document_name, **options)


class OcrRequest(CheckedBody):
    """An OCR request. All validation happens on creation, so an instance is always valid.

    `pages` counts from 0. `stream` is an addition to Mistral's API.
    """

    _rejected_fields: ClassVar[RejectedFields] = _REJECTED
    _accepted_fields: ClassVar[Collection[str]] = {"id"} | _REJECTED.keys()

    document: OcrDocument
    model: Name = DEFAULT_MODEL
    pages: StringOrArray[_Ranges, _Indices] | None = None
    include_image_base64: bool = False
    stream: bool = False

    @model_validator(mode="after")
    def _check_consistency(self) -> OcrRequest:
        self.document.check()
        return self

    @property
    def page_numbers(self) -> str:
        """The selected pages from 1 on, as in `DocumentPart.pages`; all if empty."""
        if self.pages is None or not isinstance(self.pages, str):
            return ",".join(str(index + 1) for index in self.pages or ())
        return re.sub(r"\d+", lambda number: str(int(number[0]) + 1), self.pages)

    def chat_fields(self, prompt: str, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a chat request with the whole document."""
        content = [self.document.content_part(), {"type": "text", "text": prompt}]
        return {"model": self.model, "messages": [{"role": "user", "content": content}], **sampling}


def renamed_ocr_errors() -> AbstractContextManager[None]:
    """Return a context in which errors about a chat request of `chat_fields` name the fields of the OCR request."""
    return renamed_errors(_rename)


def _rename(path: str) -> str:
    for old, new in _RENAMES:
        if path == old or path.startswith(f"{old}."):
            return new + path.removeprefix(old)
    return path
