"""Sources of media in content parts: URLs, base64, files, lists of frames and embeddings, with options."""

from __future__ import annotations

import mimetypes
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal, TypeAlias

from pydantic import Field
from typing_extensions import Self

from .base import LARGEST, Array, Count, Label, RequestModel, StringOrArray, StringOrObject, Text
from .document_part import DocumentPart, PageRanges, RenderMode
from .media_part import EncodedEmbeddings, MediaPart
from .validation_errors import invalid, show, unsupported

LOW_DETAIL_PIXELS = 256 * 28 * 28
"""Maximum number of pixels of an image with `detail: "low"`: 256 visual tokens of 28 x 28 pixels."""

JPEG_FRAMES = "data:video/jpeg;base64,"
"""Prefix of a URL that contains the frames of a video in order: JPEG files in base64, separated by commas."""

_JPEG_FRAME = "data:image/jpeg;base64,"
_DATA = "data:"
_PDF = "application/pdf"
_ANY_TYPE = "application/octet-stream"
_PDF_BASE64 = "JVBERi"
"""What the base64 of a PDF begins with."""

MAX_FRAMES = 4096
MAX_DPI = 2400

Kind: TypeAlias = Literal["image", "video"]
Rate: TypeAlias = Annotated[float, Field(gt=0, le=1000)]
PruningRate: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Change: TypeAlias = Annotated[float, Field(gt=0, le=255)]

_MAX_NAME = 256
"""Number of characters of a URL or file name that are examined."""

_BASE64: Mapping[Kind, str] = {"image": "data:image/png;base64,", "video": "data:video/mp4;base64,"}
"""Prefixes for files in base64; the format is detected from the content, not from this type."""

_FILE_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "detail": ("image", "document"),
    "video_metadata": ("video",),
    **dict.fromkeys(("pages", "render", "dpi", "max_pixels", "password"), ("document",)),
}
"""Options of files, and the kinds that have them."""

_RATE_OF_A_FRAME = "is of one frame. Set it next to `url` of the video."

_DATA_TYPE = re.compile(r"data:([\w.+-]+/[\w.+-]+)", re.IGNORECASE)
_URL = re.compile(r"(data|https?):", re.IGNORECASE)


class MediaSource(RequestModel, ABC):
    """The field of a content part that contains an image or a video, or says where it is."""

    @classmethod
    def from_string(cls, content: str | None) -> Self:
        """Return the source that a client writes as a string, or omits because the content has a `uuid`."""
        return cls.model_validate({cls().content_field: content})

    @property
    def kind(self) -> Kind:
        return "image"

    @property
    def content_field(self) -> str:
        """The name of the field with the content."""
        return "url"

    @abstractmethod
    def check(self, path: str, content_path: str, *, optional: bool) -> None:
        """Check the consistency between fields.

        Args:
            path: the path of the source in the request.
            content_path: the path of its content.
            optional: whether the content can be omitted.

        Raises:
            InvalidParameter, UnsupportedParameter: a value is missing, or cannot be combined with another one.
        """

    @abstractmethod
    def media(self, path: str, content_field: str, uuid: str | None) -> MediaPart | None:
        """Return the image or video of the content part at `path`; None for a document."""

    def document(self, path: str, content_field: str) -> DocumentPart | None:
        """Return the document of the content part at `path`; None for an image or a video."""
        return None


class URLSource(MediaSource):
    """A source with a URL and options; DashInfer-VLM spells the bounds on the size of images without the `s`."""

    min_pixels: Count | None = None
    max_pixels: Count | None = None
    min_pixel: Count | None = None
    max_pixel: Count | None = None
    pruning_rate: PruningRate | None = None

    @property
    def lower_bound(self) -> int | None:
        return self.min_pixels or self.min_pixel

    @property
    def upper_bound(self) -> int | None:
        return self.max_pixels or self.max_pixel

    def check_size(self, path: str) -> None:
        for old, new in (("min_pixel", "min_pixels"), ("max_pixel", "max_pixels")):
            if len({getattr(self, old), getattr(self, new)} - {None}) > 1:
                raise invalid(f"{path}.{old}", f"and `{new}` are synonyms but have different values. Pass one of them.")
        check_bounds(f"{path}.{'min_pixels' if self.min_pixels else 'min_pixel'}", self.lower_bound, self.upper_bound)

    def media(self, path: str, content_field: str, uuid: str | None) -> MediaPart:
        return MediaPart(
            kind=self.kind,
            path=path,
            url=self.urls(),
            uuid=uuid,
            min_pixels=self.lower_bound,
            max_pixels=self.upper_bound,
            pruning_rate=self.pruning_rate,
            url_field=content_field,
        )

    @abstractmethod
    def urls(self) -> str | tuple[str, ...] | None:
        """Return the URL, or those of the frames of a video."""


class ImageURL(URLSource):
    """The source of an image.

    `detail` limits the image's size unless the request sets `max_pixels`: "low" to `LOW_DETAIL_PIXELS`, "auto" and
    "high" to the server's limit.
    """

    url: Text | None = None
    detail: Literal["auto", "low", "high"] = "auto"

    @property
    def upper_bound(self) -> int | None:
        upper = super().upper_bound
        return max(LOW_DETAIL_PIXELS, self.lower_bound or 0) if upper is None and self.detail == "low" else upper

    def check(self, path: str, content_path: str, *, optional: bool) -> None:
        self.check_size(path)
        check_url(self.url, content_path, optional=optional)

    def urls(self) -> str | None:
        return self.url or None


class Frame(ImageURL):
    """A frame of a video: the source of an image, or a complete content part that contains it."""

    type: Literal["image_url"] = "image_url"
    image_url: ImageURL | None = None

    @property
    def image(self) -> ImageURL:
        return self.image_url or self

    def check_frame(self, path: str) -> None:
        if self.pruning_rate is not None:
            raise invalid(f"{path}.pruning_rate", _RATE_OF_A_FRAME)
        path = path if self.image_url is None else f"{path}.image_url"
        if self.image.lower_bound or self.image.upper_bound:
            raise invalid(
                path, "sets a size, but all frames of a video have the same size. Set it next to `url` of the video."
            )
        if self.image.pruning_rate is not None:
            raise invalid(f"{path}.pruning_rate", _RATE_OF_A_FRAME)
        check_url(self.image.url, f"{path}.url")


_Frames: TypeAlias = Annotated[Array[StringOrObject[Text, Frame]], Field(min_length=1, max_length=MAX_FRAMES)]


class VideoURL(URLSource):
    """The source of a video: a file, or its frames in order."""

    url: StringOrArray[Text, _Frames] | None = None
    fps: Rate | None = None
    num_frames: Count | None = None
    align: bool | None = None
    total_pixels: Count | None = None
    min_change: Change | None = None

    @property
    def kind(self) -> Kind:
        return "video"

    def check(self, path: str, content_path: str, *, optional: bool) -> None:
        self.check_size(path)
        if self.num_frames is not None and self.fps is not None:
            raise invalid(f"{path}.num_frames", f"and `{path}.fps` cannot be combined. Pass one of them.")
        if self.num_frames is not None and self.align:
            raise invalid(f"{path}.align", "cannot be combined with `num_frames`. Set `fps` instead of it.")
        if not isinstance(self.url, tuple):
            check_url(self.url, content_path, optional=optional)
        if self.num_frames is not None and isinstance(self.urls(), tuple):
            raise invalid(f"{path}.num_frames", "applies to video files only, not to lists of frames. Remove it.")
        for index, frame in enumerate(self.url if isinstance(self.url, tuple) else ()):
            if isinstance(frame, str):
                check_url(frame, f"{content_path}[{index}]")
            else:
                frame.check_frame(f"{content_path}[{index}]")

    def media(self, path: str, content_field: str, uuid: str | None) -> MediaPart:
        part = super().media(path, content_field, uuid)
        return replace(
            part,
            total_pixels=self.total_pixels,
            fps=self.fps,
            num_frames=self.num_frames,
            align=self.align,
            min_change=self.min_change,
        )

    def urls(self) -> str | tuple[str, ...] | None:
        if isinstance(self.url, tuple):
            return tuple(frame if isinstance(frame, str) else frame.image.url or "" for frame in self.url)
        if self.url and is_jpeg_frames(self.url):
            return tuple(_JPEG_FRAME + frame for frame in self.url[len(JPEG_FRAMES) :].split(","))
        return self.url or None


class InputVideo(VideoURL):
    """The source of a video as llama.cpp's clients send it: a file in base64 as `data`, or what `VideoURL` has."""

    data: Text | None = None

    @property
    def content_field(self) -> str:
        return "url" if self.data is None else "data"

    def check(self, path: str, content_path: str, *, optional: bool) -> None:
        super().check(path, content_path, optional=optional or self.data is not None)
        if self.data is not None and self.url is not None:
            raise invalid(f"{path}.data", f"and `{path}.url` cannot be combined. Pass one of them.")
        if self.data == "":
            raise invalid(f"{path}.data", "is empty. Pass a video file in base64.")

    def urls(self) -> str | tuple[str, ...] | None:
        if not self.data:
            return super().urls()
        is_url = self.data[: len(_DATA)].lower() == _DATA
        return self.data if is_url else _BASE64["video"] + self.data


class ImageEmbeds(MediaSource):
    """Visual tokens in place of an image."""

    image_embeds: Text | None = None
    image_grid_thw: (
        StringOrArray[Text, Annotated[Array[Annotated[int, Field(ge=1, le=LARGEST)]], Field(max_length=3)]] | None
    ) = None

    @property
    def content_field(self) -> str:
        return "image_embeds"

    def check(self, path: str, content_path: str, *, optional: bool) -> None:
        if not self.image_embeds and not optional:
            raise invalid(content_path, "is empty. Pass embeddings in base64.")

    def media(self, path: str, content_field: str, uuid: str | None) -> MediaPart:
        content = EncodedEmbeddings(rows=self.image_embeds, grid=self.image_grid_thw) if self.image_embeds else None
        return MediaPart(kind="image", path=path, content=content, uuid=uuid, url_field=content_field)


class VideoMetadata(RequestModel):
    fps: Rate | None = None


class FileSource(MediaSource):
    """A file: an image, a video or a PDF, as a data: URL or base64 in `file_data`, or as a URL or path in `file_url`.

    LiteLLM's are a URL as `file_id`, the media type `format`, and options of an image or a video. Documents have
    options of their own: the pages, and how they are rendered.
    """

    file_data: Text | None = None
    file_url: Text | None = None
    file_id: Text | None = None
    filename: Text | None = None
    format: Label | None = None
    detail: Literal["auto", "low", "high"] | None = None
    video_metadata: VideoMetadata | None = None
    pages: PageRanges | None = None
    render: RenderMode | None = None
    dpi: Annotated[int, Field(ge=1, le=MAX_DPI)] | None = None
    max_pixels: Count | None = None
    password: Label | None = Field(default=None, repr=False)

    @property
    def kind(self) -> Kind:
        return "video" if self._media_type.startswith("video/") else "image"

    @property
    def content_field(self) -> str:
        return next(iter(self._given), "file_data")

    def check(self, path: str, content_path: str, *, optional: bool) -> None:
        if len(given := self._given) > 1:
            raise unsupported(f"{path}.{given[1]}", f"is not available next to `{given[0]}`. Remove one of them.")
        if self.content_field == "file_id" and not self._is_url:
            raise unsupported(
                content_path, "names a stored file, but files are not stored. Send `file_data` or `file_url`."
            )
        check_url(self._content or None, content_path)
        if not self._is_document and self._media_type.partition("/")[0] not in {"image", "video"}:
            raise unsupported(
                content_path,
                f"must be an image, a video or a PDF{self._got}: a data: URL, or base64 with a `filename` such as"
                " photo.png. Send other documents as a PDF, or as text.",
            )
        kind = "document" if self._is_document else self.kind
        if optional and self._is_document:
            raise unsupported(f"{path.rpartition('.')[0]}.uuid", "is not available for a document. Remove it.")
        for name, kinds in _FILE_OPTIONS.items():
            if getattr(self, name) is not None and kind not in kinds:
                raise unsupported(f"{path}.{name}", f"is not available for a file of the kind {kind}. Remove it.")
        for name in ("dpi", "max_pixels") if self.render == "text" else ():
            if getattr(self, name) is not None:
                raise unsupported(f"{path}.{name}", 'is not available for `render` "text". Remove it.')
        if self.video_metadata and self.video_metadata.model_extra:
            raise unsupported(f"{path}.video_metadata", "has other options than `fps`. Remove them.")

    def media(self, path: str, content_field: str, uuid: str | None) -> MediaPart | None:
        if self._is_document:
            return None
        url = self._content if self._is_url else _BASE64[self.kind] + self._content
        if self.kind == "image":
            return ImageURL(url=url, detail=self.detail or "auto").media(path, content_field, uuid)
        fps = self.video_metadata.fps if self.video_metadata else None
        return VideoURL(url=url, fps=fps).media(path, content_field, uuid)

    def document(self, path: str, content_field: str) -> DocumentPart | None:
        if not self._is_document:
            return None
        return DocumentPart(
            path=path,
            url=self._content if self._is_url else f"data:{_PDF};base64,{self._content}",
            pages=self.pages or "",
            render=self.render or "both",
            dpi=self.dpi,
            max_pixels=self.max_pixels or (LOW_DETAIL_PIXELS if self.detail == "low" else None),
            password=self.password,
            url_field=content_field,
        )

    @property
    def _given(self) -> list[str]:
        return [name for name in ("file_data", "file_url", "file_id") if getattr(self, name)]

    @property
    def _content(self) -> str:
        content: str | None = getattr(self, self.content_field)
        return content or ""

    @property
    def _is_url(self) -> bool:
        return self.content_field == "file_url" or _URL.match(self._content) is not None

    @property
    def _is_document(self) -> bool:
        return self._media_type == _PDF

    @property
    def _got(self) -> str:
        return f", got {show(self._media_type)}" if self._media_type else ""

    @property
    def _media_type(self) -> str:
        if not self._is_url and self._content.startswith(_PDF_BASE64):
            return _PDF
        declared = _DATA_TYPE.match(self._content, 0, _MAX_NAME)
        name = self.filename or ("" if self.file_data else self._content.partition("?")[0])
        guessed = mimetypes.guess_type(name[-_MAX_NAME:], strict=False)[0]
        if declared and declared[1].lower() != _ANY_TYPE:
            guessed = declared[1]
        # The Responses API fetches documents from URLs, which often have no suffix.
        return (self.format or guessed or (_PDF if self.content_field == "file_url" else "")).lower()


def check_bounds(path: str, minimum: int | None, maximum: int | None) -> None:
    """Raise InvalidParameter if a minimum number of pixels is above the maximum."""
    if minimum is not None and maximum is not None and minimum > maximum:
        raise invalid(path, f"allows no size: at least {minimum} pixels, but at most {maximum}. Change one of them.")


def check_url(url: str | None, path: str, *, optional: bool = False) -> None:
    """Raise InvalidParameter if a URL is missing, or has too many frames, which are counted before it is split."""
    if not url and not optional:
        raise invalid(path, f"is {'required' if url is None else 'empty'}. Pass a `data:` or `https:` URL.")
    if url and is_jpeg_frames(url) and url.count(",") > MAX_FRAMES:
        raise invalid(path, f"must have at most {MAX_FRAMES} frames.")


def is_jpeg_frames(url: str) -> bool:
    return url[: len(JPEG_FRAMES)].lower() == JPEG_FRAMES
