"""Messages, their content parts, and the images and videos that they refer to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, Strict, Tag

from ..errors import InvalidParameter, UnsupportedParameter
from .base import LARGEST, STRING_OR_ARRAY, Count, Label, Name, RequestModel, Text, string_or_object
from .fields import REJECTED_IN_MESSAGES, REJECTED_PARTS
from .files import FileSource
from .validation_errors import show

LOW_DETAIL_PIXELS = 256 * 28 * 28
"""Maximum number of pixels of an image with `detail: "low"`: 256 visual tokens of 28 x 28 pixels."""

JPEG_FRAMES = "data:video/jpeg;base64,"
"""Prefix of a URL that contains the frames of a video in order: JPEG files in base64, separated by commas."""

_JPEG_FRAME = "data:image/jpeg;base64,"
_DATA = "data:"
_VIDEO_FILE = "data:video/mp4;base64,"
"""Prefix for a file in base64; the format is detected from the content, not from this type."""

MAX_PARTS = 1024
MAX_FRAMES = 4096
MAX_TOOL_CALLS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedEmbeddings:
    """Visual tokens in a request, in base64 and not decoded yet.

    Attributes:
        rows: a safetensors file or a `torch.save` payload with the tensor `image_embeds`, [tokens, hidden size].
        grid: the same for the tensor `image_grid_thw`, or its three numbers; None if `rows` contains both tensors.
    """

    rows: str = field(repr=False)
    grid: str | tuple[int, ...] | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaPart:
    """An image or video that a message refers to, not fetched yet.

    It is identified by `url` or `content`, or, if it was sent before under that name, by its `uuid` alone.

    Attributes:
        kind: the kind that the content part declares.
        path: its path in the request, such as `messages[0].content[1]`.
        url: the source, not empty and not validated otherwise. For a video it can be a tuple of its frames in order,
            each the URL of an image.
        content: the content itself: `EncodedEmbeddings`, or from a caller in this process any object that
            `media.python_objects` accepts for an image or video.
        uuid: the caller's name for it.
        min_pixels: minimum number of pixels (of each frame) after resizing, at least 1.
        max_pixels: maximum number of pixels (of each frame) after resizing, at least `min_pixels`.
        total_pixels: maximum number of pixels of all frames of a video together, at least 1.
        fps: frames per second, above 0: those to sample from a video file, or those that a list of frames was sampled
            at.
        num_frames: number of frames to sample from a video file, at least 1; never with `fps` or a list of frames.
        background: red, green and blue of the background of transparent pixels.
        url_field: the field of the part with its URL, such as `input_video.data`; errors name it. None means
            `image_url.url` or `video_url.url`, and "" that the part is its URL.
    """

    kind: Literal["image", "video"]
    path: str
    url: str | tuple[str, ...] | None = None
    content: object = field(default=None, repr=False, compare=False)
    uuid: str | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None
    fps: float | None = None
    num_frames: int | None = None
    background: tuple[int, int, int] | None = None
    url_field: str | None = field(default=None, compare=False)

    @property
    def has_source(self) -> bool:
        """Whether the request contains a source, rather than the `uuid` alone."""
        return self.url is not None or self.content is not None

    @property
    def is_sampled(self) -> bool:
        """Whether it is a video that has to be sampled: a file, or an open reader of one, such as decord's."""
        return self.kind == "video" and (isinstance(self.url, str) or hasattr(self.content, "get_batch"))

    @property
    def url_path(self) -> str:
        """The path of the URL in the request; `path` if there is a Python object instead."""
        if self.content is not None:
            return self.path
        return join_path(self.path, f"{self.kind}_url.url" if self.url_field is None else self.url_field)

    @property
    def options_field(self) -> str:
        """The field of the part that has the options; empty if they are fields of the part."""
        if self.content is not None:
            return ""
        return f"{self.kind}_url" if self.url_field is None else self.url_field.partition(".")[0]

    @property
    def options_path(self) -> str:
        """The path of the object that has the options."""
        return join_path(self.path, self.options_field)


def join_path(path: str, name: str) -> str:
    """Return the path of a field of an object; of the object itself if the name is empty."""
    return f"{path}.{name}" if name else path


class PixelBounds(RequestModel):
    """Bounds on the size of an image or frame; DashInfer-VLM spells them without the `s`."""

    min_pixels: Count | None = None
    max_pixels: Count | None = None
    min_pixel: Count | None = None
    max_pixel: Count | None = None

    @property
    def lower_bound(self) -> int | None:
        return self.min_pixels or self.min_pixel

    @property
    def upper_bound(self) -> int | None:
        return self.max_pixels or self.max_pixel

    def check_size(self, path: str) -> None:
        for old, new in (("min_pixel", "min_pixels"), ("max_pixel", "max_pixels")):
            if len({getattr(self, old), getattr(self, new)} - {None}) > 1:
                raise InvalidParameter(
                    f"`{old}` and `{new}` of `{path}` are synonyms but have different values. Pass one of them.",
                    param=f"{path}.{old}",
                )
        if (self.lower_bound or 0) > (self.upper_bound or math.inf):
            field = "min_pixels" if self.min_pixels else "min_pixel"
            raise InvalidParameter(
                f"`{path}.{field}` is {self.lower_bound}, more than the maximum number of pixels, {self.upper_bound}.",
                param=f"{path}.{field}",
            )


class ImageURL(PixelBounds):
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

    def check(self, path: str, *, has_uuid: bool = False) -> None:
        self.check_size(path)
        if self.url or not has_uuid:
            _check_url(self.url, f"{path}.url")


def _image_tag(value: object) -> str | None:
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, (dict, ImageURL)) else None


class FramePart(RequestModel):
    """A video frame written as a complete content part."""

    type: Literal["image_url"] = "image_url"
    image_url: ImageURL


def _frame_tag(value: object) -> str | None:
    if isinstance(value, str):
        return "string"
    if isinstance(value, (FramePart, ImageURL)):
        return "part" if isinstance(value, FramePart) else "object"
    return ("part" if "image_url" in value else "object") if isinstance(value, dict) else None


_Frame: TypeAlias = Annotated[
    Annotated[Text, Tag("string")] | Annotated[ImageURL, Tag("object")] | Annotated[FramePart, Tag("part")],
    string_or_object(_frame_tag),
]
_Frames: TypeAlias = Annotated[
    tuple[_Frame, ...], Strict(False), Field(min_length=1, max_length=MAX_FRAMES, fail_fast=True)
]


class VideoURL(PixelBounds):
    """The source of a video: a file, or its frames in order."""

    url: Annotated[Annotated[Text, Tag("string")] | Annotated[_Frames, Tag("array")], STRING_OR_ARRAY] | None = None
    fps: Annotated[float, Field(gt=0, le=1000)] | None = None
    num_frames: Count | None = None
    total_pixels: Count | None = None

    def check(self, path: str, *, has_uuid: bool = False) -> None:
        self.check_size(path)
        if self.num_frames is not None and self.fps is not None:
            raise InvalidParameter(
                f"`{path}.num_frames` and `{path}.fps` cannot be combined. Pass one of them.",
                param=f"{path}.num_frames",
            )
        if isinstance(self.url, tuple):
            if self.num_frames is not None:
                raise InvalidParameter(
                    f"`{path}.num_frames` applies to video files only, not to lists of frames. Remove it.",
                    param=f"{path}.num_frames",
                )
            for index, frame in enumerate(self.url):
                _check_frame(frame, f"{path}.url[{index}]")
        elif self.url or not has_uuid:
            _check_url(self.url, f"{path}.url")
            _check_jpeg_frames(self.url or "", f"{path}.url")

    @property
    def url_name(self) -> str:
        """The name of the field with the URL."""
        return "url"

    def urls(self) -> str | tuple[str, ...] | None:
        if isinstance(self.url, tuple):
            return tuple(map(_frame_url, self.url))
        if self.url and _is_jpeg_frames(self.url):
            frames = self.url[len(JPEG_FRAMES) :].split(",")
            return tuple(_JPEG_FRAME + frame for frame in frames)
        return self.url or None


class InputVideo(VideoURL):
    """The source of a video as llama.cpp's clients send it: a file in base64 as `data`, or what `VideoURL` has."""

    data: Text | None = None

    def check(self, path: str, *, has_uuid: bool = False) -> None:
        super().check(path, has_uuid=has_uuid or self.data is not None)
        if self.data is not None and self.url is not None:
            raise InvalidParameter(f"`{path}` has both `data` and `url`. Pass one of them.", param=f"{path}.data")
        if self.data == "":
            raise InvalidParameter(f"`{path}.data` is empty. Pass a video file in base64.", param=f"{path}.data")

    @property
    def url_name(self) -> str:
        return "url" if self.data is None else "data"

    def urls(self) -> str | tuple[str, ...] | None:
        if not self.data:
            return super().urls()
        is_url = self.data[: len(_DATA)].lower() == _DATA
        return self.data if is_url else _VIDEO_FILE + self.data


def _video_tag(value: object) -> str | None:
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, (dict, VideoURL)) else None


def _is_jpeg_frames(url: str) -> bool:
    return url[: len(JPEG_FRAMES)].lower() == JPEG_FRAMES


def _check_jpeg_frames(url: str, path: str) -> None:
    """Check the number of frames before the URL is split."""
    if _is_jpeg_frames(url) and url.count(",") > MAX_FRAMES:
        raise InvalidParameter(f"`{path}` must have at most {MAX_FRAMES} frames.", param=path)


class ImageEmbeds(RequestModel):
    """Visual tokens in place of an image."""

    image_embeds: Text
    image_grid_thw: (
        Annotated[
            Annotated[Text, Tag("string")]
            | Annotated[
                tuple[Annotated[int, Field(ge=1, le=LARGEST)], ...], Strict(False), Field(max_length=3), Tag("array")
            ],
            STRING_OR_ARRAY,
        ]
        | None
    ) = None

    def check(self, path: str) -> None:
        if not self.image_embeds:
            raise InvalidParameter(
                f"`{path}.image_embeds` is empty. Pass embeddings in base64.", param=f"{path}.image_embeds"
            )


def _embeds_tag(value: object) -> str | None:
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, (dict, ImageEmbeds)) else None


def _frame_url(frame: str | ImageURL | FramePart) -> str:
    if isinstance(frame, FramePart):
        frame = frame.image_url
    return frame if isinstance(frame, str) else frame.url or ""


def _check_frame(frame: str | ImageURL | FramePart, path: str) -> None:
    if isinstance(frame, FramePart):
        frame, path = frame.image_url, f"{path}.image_url"
    if isinstance(frame, str):
        _check_url(frame, path)
        return
    if frame.lower_bound or frame.upper_bound:
        raise InvalidParameter(
            f"`{path}` sets a size, but all frames of a video have the same size. Set it next to `url` of the video.",
            param=path,
        )
    _check_url(frame.url, f"{path}.url")


def _check_url(url: str | None, path: str) -> None:
    if url is None:
        raise InvalidParameter(f"`{path}` is required. Pass a `data:` or `https:` URL.", param=path)
    if not url:
        raise InvalidParameter(f"`{path}` is empty. Pass a `data:` or `https:` URL.", param=path)


class Part(RequestModel):
    """A content part; `type` names the field that holds its value.

    An image or video that was sent before under its `uuid` can be omitted.
    """

    type: Text
    text: Text | None = None
    image_url: (
        Annotated[Annotated[Text, Tag("string")] | Annotated[ImageURL, Tag("object")], string_or_object(_image_tag)]
        | None
    ) = None
    video_url: (
        Annotated[Annotated[Text, Tag("string")] | Annotated[VideoURL, Tag("object")], string_or_object(_video_tag)]
        | None
    ) = None
    input_video: InputVideo | None = None
    image_embeds: (
        Annotated[Annotated[Text, Tag("string")] | Annotated[ImageEmbeds, Tag("object")], string_or_object(_embeds_tag)]
        | None
    ) = None
    file: FileSource | None = None
    uuid: Label | None = None
    refusal: Text | None = None

    def check(self, role: str, path: str) -> None:
        if self.type in REJECTED_PARTS:
            raise UnsupportedParameter(
                f"`{path}` has the type {show(self.type)}, which is not supported. {REJECTED_PARTS[self.type]}",
                param=f"{path}.type",
            )
        if self.type not in _PART_TYPES:
            raise InvalidParameter(
                f"`{path}.type` must be one of {', '.join(_PART_TYPES)}; got {show(self.type)}.", param=f"{path}.type"
            )
        if role not in _PART_TYPES[self.type]:
            raise InvalidParameter(
                f"`{path}` has the type {self.type}, which messages with the role {role!r} cannot contain."
                f" Use the role {_PART_TYPES[self.type][0]!r}.",
                param=path,
            )
        if self.type == "input_video" and self.input_video is not None and self.video_url is not None:
            raise InvalidParameter(
                f"`{path}` has both `input_video` and `video_url`. Pass one of them.", param=f"{path}.video_url"
            )
        self._check_value(f"{path}.{self._value_field}")

    @property
    def _value_field(self) -> str:
        """The field with the value: the one that `type` names, but clients also send `input_video` as `video_url`."""
        return "video_url" if self.type == "input_video" and self.video_url is not None else self.type

    def _check_value(self, path: str) -> None:
        value, has_uuid = getattr(self, self._value_field), self.uuid is not None and self.type in _MEDIA_TYPES
        if value is None and not has_uuid:
            raise InvalidParameter(f"`{path}` is required.", param=path)
        if isinstance(value, str) and self._value_field in {"image_url", "video_url"} and (value or not has_uuid):
            _check_url(value, path)
            if self._value_field == "video_url":
                _check_jpeg_frames(value, path)
        elif isinstance(value, (ImageURL, VideoURL)):
            value.check(path, has_uuid=has_uuid)
        elif isinstance(value, ImageEmbeds):
            value.check(path)
        elif isinstance(value, FileSource):
            value.check(path)
            _check_jpeg_frames(value.source, f"{path}.{value.source_field}")
        elif self.type == "image_embeds" and not value and not has_uuid:
            raise InvalidParameter(f"`{path}` is empty. Pass embeddings in base64.", param=path)

    def media(self, path: str) -> MediaPart | None:
        if self.type == "image_url":
            value = self.image_url or ImageURL()
            image = ImageURL(url=value) if isinstance(value, str) else value
            return MediaPart(
                kind="image",
                path=path,
                url=image.url or None,
                uuid=self.uuid,
                min_pixels=image.lower_bound,
                max_pixels=image.upper_bound,
                url_field="image_url" if isinstance(value, str) else None,
            )
        if self.type == "image_embeds":
            return MediaPart(kind="image", path=path, content=self._embeddings(), uuid=self.uuid)
        if self.type == "file" and self.file is not None:
            return self._file(self.file, path)
        return self._video(path) if self.type in _VIDEO_TYPES else None

    def _video(self, path: str) -> MediaPart:
        value = getattr(self, self._value_field) or VideoURL()
        video = VideoURL(url=value) if isinstance(value, str) else value
        source = "" if isinstance(value, str) else f".{value.url_name}"
        return MediaPart(
            kind="video",
            path=path,
            url=video.urls(),
            uuid=self.uuid,
            min_pixels=video.lower_bound,
            max_pixels=video.upper_bound,
            total_pixels=video.total_pixels,
            fps=video.fps,
            num_frames=video.num_frames,
            url_field=f"{self._value_field}{source}",
        )

    def _file(self, file: FileSource, path: str) -> MediaPart:
        url = file.url()
        url_field = f"file.{file.source_field}"
        if file.kind == "video":
            urls = VideoURL(url=url).urls()
            return MediaPart(kind="video", path=path, url=urls, uuid=self.uuid, fps=file.fps, url_field=url_field)
        bound = ImageURL(detail=file.detail or "auto").upper_bound
        return MediaPart(kind="image", path=path, url=url, uuid=self.uuid, max_pixels=bound, url_field=url_field)

    def _embeddings(self) -> EncodedEmbeddings | None:
        if isinstance(self.image_embeds, ImageEmbeds):
            return EncodedEmbeddings(rows=self.image_embeds.image_embeds, grid=self.image_embeds.image_grid_thw)
        return EncodedEmbeddings(rows=self.image_embeds) if self.image_embeds else None

    def for_template(self) -> dict[str, str]:
        if self.type in {"text", "refusal"}:
            return {"type": "text", "text": getattr(self, self.type)}
        if self.type == "file" and self.file is not None:
            return {"type": self.file.kind or "image"}
        return {"type": "video" if self.type in _VIDEO_TYPES else "image"}


_ROLES = ("user", "assistant", "system", "developer", "tool")
_VIDEO_TYPES = ("video_url", "input_video")
_MEDIA_TYPES = ("image_url", *_VIDEO_TYPES, "image_embeds")
_PART_TYPES = {
    "text": _ROLES,
    **dict.fromkeys((*_MEDIA_TYPES, "file"), ("user", "tool")),
    "refusal": ("assistant",),
}
"""Types of content parts, and the roles whose messages can contain them."""


class Function(RequestModel):
    name: Name
    arguments: Text


class ToolCall(RequestModel):
    """A tool call that the assistant made earlier in the conversation."""

    id: Name
    type: Literal["function"] = "function"
    function: Function

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}


_Parts: TypeAlias = Annotated[
    tuple[Part, ...], Strict(False), Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)
]


class Message(RequestModel):
    """A message. `content` is optional for assistant messages with tool calls or a refusal."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Annotated[Text, Tag("string")] | Annotated[_Parts, Tag("array")], STRING_OR_ARRAY] | None = None
    name: Name | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[tuple[ToolCall, ...], Strict(False), Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] = ()
    tool_call_id: Name | None = None

    def check(self, path: str) -> None:
        for name, next_step in REJECTED_IN_MESSAGES.items():
            if name in (self.model_extra or {}):
                raise UnsupportedParameter(f"`{path}.{name}` is not supported. {next_step}", param=f"{path}.{name}")
        for name in ("tool_calls", "refusal", "reasoning_content"):
            if self.role != "assistant" and getattr(self, name):
                raise InvalidParameter(
                    f"`{path}.{name}` is allowed in messages of the assistant only.", param=f"{path}.{name}"
                )
        if self.content is None and not self.tool_calls and self.refusal is None:
            raise InvalidParameter(
                f"`{path}.content` is required. Pass a string or an array of parts.", param=f"{path}.content"
            )
        for part_path, part in self.parts(path):
            part.check(self.role, part_path)

    def parts(self, path: str) -> list[tuple[str, Part]]:
        """Return the content parts, each with its path in the request; none if the content is a string."""
        parts = self.content if isinstance(self.content, tuple) else ()
        return [(f"{path}.content[{index}]", part) for index, part in enumerate(parts)]

    def for_template(self) -> dict[str, Any]:
        content: str | list[dict[str, str]]
        if isinstance(self.content, tuple):
            content = [part.for_template() for part in self.content]
        else:
            content = (self.refusal or "") if self.content is None else self.content
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        optional = {
            "name": self.name,
            "reasoning_content": self.reasoning_content,
            "tool_calls": [call.for_template() for call in self.tool_calls],
            "tool_call_id": self.tool_call_id,
        }
        return message | {key: value for key, value in optional.items() if value}
