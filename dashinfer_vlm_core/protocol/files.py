"""Content parts of the type `file`, whose media type or name says whether they are images or videos."""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Mapping
from typing import Literal

from .base import ClosedModel, Label, Text
from .media_part import MediaPart
from .sources import ImageURL, Kind, MediaSource, Rate, VideoURL, check_url
from .validation_errors import unsupported

_MAX_NAME = 256
"""Number of characters of a URL or file name that are examined."""

_BASE64: Mapping[Kind, str] = {"image": "data:image/png;base64,", "video": "data:video/mp4;base64,"}
"""Prefixes for base64; the format is detected from the content, not from this type."""

_DATA_TYPE = re.compile(r"data:([\w.+-]+/[\w.+-]+)", re.IGNORECASE)
_URL = re.compile(r"(data|https?):", re.IGNORECASE)


class VideoMetadata(ClosedModel):
    fps: Rate | None = None


class FileSource(MediaSource):
    """A file: a data: URL or base64 as `file_data`.

    The other fields are LiteLLM's: a URL as `file_id`, the media type `format`, and options of an image or a video.
    """

    file_data: Text | None = None
    file_id: Text | None = None
    filename: Text | None = None
    format: Label | None = None
    detail: Literal["auto", "low", "high"] | None = None
    video_metadata: VideoMetadata | None = None

    @property
    def kind(self) -> Kind:
        return "video" if self._general_type == "video" else "image"

    @property
    def content_field(self) -> str:
        return "file_id" if self.file_id and not self.file_data else "file_data"

    def check(self, path: str, content_path: str, *, optional: bool) -> None:
        if self._general_type not in {"image", "video"} or not (self.file_data or self._is_url):
            raise unsupported(
                content_path,
                "must be an image or a video: a data: URL in `file_data`, or base64 with a `filename` such as"
                " photo.png. Documents are not supported, and files are not stored. Send the pages of a document as"
                " images, or its text.",
            )
        option = "detail" if self.kind == "video" else "video_metadata"
        if getattr(self, option) is not None:
            raise unsupported(f"{path}.{option}", f"is not available for a file of the kind {self.kind}. Remove it.")
        check_url(self._content, content_path)

    def media(self, path: str, content_field: str, uuid: str | None) -> MediaPart:
        url = self._content
        if not self._is_url:
            url = _BASE64[self.kind] + url
        fps = self.video_metadata.fps if self.video_metadata else None
        is_video = self.kind == "video"
        source = VideoURL(url=url, fps=fps) if is_video else ImageURL(url=url, detail=self.detail or "auto")
        return source.media(path, content_field, uuid)

    @property
    def _content(self) -> str:
        return self.file_data or self.file_id or ""

    @property
    def _general_type(self) -> str:
        return self._media_type().partition("/")[0].lower()

    @property
    def _is_url(self) -> bool:
        return _URL.match(self._content) is not None

    def _media_type(self) -> str:
        if self.format:
            return self.format
        if declared := _DATA_TYPE.match(self._content, 0, _MAX_NAME):
            return declared[1]
        name = self.filename or ("" if self.file_data else self._content)
        return mimetypes.guess_type(name[-_MAX_NAME:], strict=False)[0] or ""
