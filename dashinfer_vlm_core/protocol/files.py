"""Content parts of the type `file`, whose media type or name says whether they are images or videos."""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field

from ..errors import UnsupportedParameter
from .base import Label, RequestModel, Text

_MAX_NAME = 256
"""Number of characters of a URL or file name that are examined."""

_BASE64: Mapping[str, str] = MappingProxyType({"image": "data:image/png;base64,", "video": "data:video/mp4;base64,"})
"""Prefixes for base64; the format is detected from the content, not from this type."""

_DATA_TYPE = re.compile(r"data:([\w.+-]+/[\w.+-]+)", re.IGNORECASE)
_URL = re.compile(r"(data|https?):", re.IGNORECASE)


class VideoMetadata(RequestModel):
    fps: Annotated[float, Field(gt=0, le=1000)] | None = None


class FileSource(RequestModel):
    """A file: a data: URL or base64 as `file_data`.

    The other fields are LiteLLM's: a URL as `file_id`, the media type `format`, and options of an image or a video.
    """

    file_data: Text | None = None
    file_id: Text | None = None
    filename: Text | None = None
    format: Label | None = None
    detail: Literal["auto", "low", "high"] | None = None
    video_metadata: VideoMetadata | None = None

    def check(self, path: str) -> None:
        if self.kind is None or not (self.file_data or self._is_url):
            raise UnsupportedParameter(
                f"`{path}.{self.source_field}` must be an image or a video: a data: URL in `file_data`, or base64 with"
                " a `filename` such as photo.png. Documents are not supported, and files are not stored. Send the pages"
                " of a document as images, or its text.",
                param=f"{path}.{self.source_field}",
            )
        for kind, option in (("image", "detail"), ("video", "video_metadata")):
            if kind != self.kind and getattr(self, option) is not None:
                raise UnsupportedParameter(
                    f"`{path}.{option}` is not available for a file of the kind {self.kind}. Remove it.",
                    param=f"{path}.{option}",
                )
        if self.video_metadata and self.video_metadata.model_extra:
            raise UnsupportedParameter(
                f"`{path}.video_metadata` has other options than `fps`. Remove them.", param=f"{path}.video_metadata"
            )

    @property
    def kind(self) -> Literal["image", "video"] | None:
        """What it contains; None for anything else."""
        kind = self._media_type().partition("/")[0].lower()
        if kind == "image":
            return "image"
        return "video" if kind == "video" else None

    @property
    def source(self) -> str:
        return self.file_data or self.file_id or ""

    @property
    def source_field(self) -> str:
        """The name of the field with the content."""
        return "file_id" if self.file_id and not self.file_data else "file_data"

    @property
    def fps(self) -> float | None:
        return self.video_metadata.fps if self.video_metadata else None

    def url(self) -> str:
        """Return the URL of an image or a video."""
        return self.source if self._is_url else _BASE64[self.kind or ""] + self.source

    @property
    def _is_url(self) -> bool:
        return _URL.match(self.source) is not None

    def _media_type(self) -> str:
        if self.format:
            return self.format
        if declared := _DATA_TYPE.match(self.source, 0, _MAX_NAME):
            return declared[1]
        name = self.filename or ("" if self.file_data else self.source)
        return mimetypes.guess_type(name[-_MAX_NAME:], strict=False)[0] or ""
