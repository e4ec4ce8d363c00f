"""Messages and their parts, and the pictures and videos that they refer to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, Strict, Tag

from ..errors import InvalidParameter, UnsupportedParameter
from .base import LARGEST, STRING_OR_ARRAY, Count, Label, LenientModel, Name, Text, string_or_object
from .fields import REFUSED_IN_MESSAGES, REFUSED_PARTS
from .validation_errors import show

LOW_DETAIL_PIXELS = 256 * 28 * 28
"""Most pixels of a picture sent with `detail: "low"`: those of 256 visual tokens of 28 x 28 pixels."""

JPEG_FRAMES = "data:video/jpeg;base64,"
"""How a URL begins that holds the frames of a video one after the other: JPEG files in base64, separated by commas."""

MAX_PARTS = 1024
MAX_FRAMES = 4096
MAX_TOOL_CALLS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedEmbeddings:
    """Visual tokens that a request brings along, in base64 and not read yet.

    Attributes:
        rows: a safetensors file or a `torch.save` payload with the tensor `image_embeds`, [tokens, hidden size].
        grid: the same of `image_grid_thw`, or its three numbers; None where `rows` holds both.
    """

    rows: str = field(repr=False)
    grid: str | tuple[int, ...] | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaPart:
    """One picture or video that a message refers to, not fetched yet.

    One of `url`, `content` and `uuid` says what it is; with a `uuid` alone it was sent before under that name.

    Attributes:
        kind: what the part says it is.
        part: where it stands in the request, such as `messages[0].content[1]`.
        url: where to get it, not empty and otherwise unchecked; for a video also a tuple: its frames in order, each the
            URL of a picture.
        content: what is already there: `EncodedEmbeddings`, or from a caller in this process whatever `media.memory`
            takes for a picture or a video.
        uuid: the caller's name for it.
        min_pixels: least pixels (of each frame) after resizing, at least 1.
        max_pixels: most pixels (of each frame) after resizing, at least `min_pixels`.
        total_pixels: most pixels of all frames of a video together, at least 1.
        fps: frames per second to sample from a video file, above 0; never with a list.
        num_frames: frames to sample from a video file instead, at least 1; never with `fps`, never with a list.
        background: red, green and blue under transparent pixels.
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

    @property
    def given(self) -> bool:
        """Whether it comes along, rather than by its `uuid` alone."""
        return self.url is not None or self.content is not None


class PixelBounds(LenientModel):
    """Bounds on the size of a picture or frame; DashInfer-VLM spells them without the `s`."""

    min_pixels: Count | None = None
    max_pixels: Count | None = None
    min_pixel: Count | None = None
    max_pixel: Count | None = None

    @property
    def least(self) -> int | None:
        return self.min_pixels or self.min_pixel

    @property
    def most(self) -> int | None:
        return self.max_pixels or self.max_pixel

    def check_size(self, where: str) -> None:
        for old, new in (("min_pixel", "min_pixels"), ("max_pixel", "max_pixels")):
            if len({getattr(self, old), getattr(self, new)} - {None}) > 1:
                raise InvalidParameter(
                    f"`{old}` and `{new}` of `{where}` mean the same, but differ: give one of them.",
                    param=f"{where}.{old}",
                )
        if (self.least or 0) > (self.most or math.inf):
            field = "min_pixels" if self.min_pixels else "min_pixel"
            raise InvalidParameter(
                f"`{where}.{field}` is {self.least}, more than the most pixels, {self.most}.", param=f"{where}.{field}"
            )


class ImageURL(PixelBounds):
    """A picture's source.

    `detail` bounds the picture's size, unless the request does so itself by `max_pixels`: "low" takes at most
    `LOW_DETAIL_PIXELS`, "auto" and "high" what the server allows.
    """

    url: Text | None = None
    detail: Literal["auto", "low", "high"] = "auto"

    @property
    def most(self) -> int | None:
        most = super().most
        return max(LOW_DETAIL_PIXELS, self.least or 0) if most is None and self.detail == "low" else most

    def check(self, where: str, *, known: bool = False) -> None:
        self.check_size(where)
        if self.url or not known:
            _check_url(self.url, f"{where}.url")


class FramePart(LenientModel):
    """A frame that is spelled as a whole content part."""

    type: Literal["image_url"] = "image_url"
    image_url: ImageURL


def _frame_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "string"
    if isinstance(value, (FramePart, ImageURL)):
        return "part" if isinstance(value, FramePart) else "object"
    return ("part" if "image_url" in value else "object") if isinstance(value, dict) else None


_Frame: TypeAlias = Annotated[
    Annotated[Text, Tag("string")] | Annotated[ImageURL, Tag("object")] | Annotated[FramePart, Tag("part")],
    string_or_object(_frame_kind),
]
_Frames: TypeAlias = Annotated[
    tuple[_Frame, ...], Strict(False), Field(min_length=1, max_length=MAX_FRAMES, fail_fast=True)
]


class VideoURL(PixelBounds):
    """A video's source: a file, or its frames in order."""

    url: Annotated[Annotated[Text, Tag("string")] | Annotated[_Frames, Tag("array")], STRING_OR_ARRAY] | None = None
    fps: Annotated[float, Field(gt=0, le=1000)] | None = None
    num_frames: Count | None = None
    total_pixels: Count | None = None

    def check(self, where: str, *, known: bool = False) -> None:
        self.check_size(where)
        if self.num_frames is not None and self.fps is not None:
            raise InvalidParameter(
                f"`{where}.num_frames` and `{where}.fps` both say how to sample the video: give one of them.",
                param=f"{where}.num_frames",
            )
        if self.num_frames is not None and isinstance(self.url, tuple):
            raise InvalidParameter(
                f"`{where}.num_frames` samples a video file, and a list of frames is taken whole: leave it out.",
                param=f"{where}.num_frames",
            )
        if isinstance(self.url, tuple):
            for index, frame in enumerate(self.url):
                _check_frame(frame, f"{where}.url[{index}]")
        elif self.url or not known:
            _check_url(self.url, f"{where}.url")
            _check_jpeg_frames(self.url or "", f"{where}.url")

    def urls(self) -> str | tuple[str, ...] | None:
        if isinstance(self.url, tuple):
            return tuple(map(_frame_url, self.url))
        if self.url and _is_jpeg_frames(self.url):
            return tuple(f"data:image/jpeg;base64,{frame}" for frame in self.url[len(JPEG_FRAMES) :].split(","))
        return self.url or None


def _is_jpeg_frames(url: str) -> bool:
    return url[: len(JPEG_FRAMES)].lower() == JPEG_FRAMES


def _check_jpeg_frames(url: str, where: str) -> None:
    """Counted before they are cut apart."""
    if _is_jpeg_frames(url) and url.count(",") > MAX_FRAMES:
        raise InvalidParameter(f"`{where}` must have at most {MAX_FRAMES} frames.", param=where)


class ImageEmbeds(LenientModel):
    """Visual tokens in place of a picture."""

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

    def check(self, where: str) -> None:
        if not self.image_embeds:
            raise InvalidParameter(f"`{where}.image_embeds` is empty.", param=f"{where}.image_embeds")


def _embeds_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, (dict, ImageEmbeds)) else None


def _frame_url(frame: str | ImageURL | FramePart) -> str:
    if isinstance(frame, FramePart):
        frame = frame.image_url
    return frame if isinstance(frame, str) else frame.url or ""


def _check_frame(frame: str | ImageURL | FramePart, where: str) -> None:
    if isinstance(frame, FramePart):
        frame, where = frame.image_url, f"{where}.image_url"
    if isinstance(frame, str):
        _check_url(frame, where)
        return
    if frame.least or frame.most:
        raise InvalidParameter(
            f"`{where}` sets a size, but all frames of a video have one: set it beside `url` of the video.", param=where
        )
    _check_url(frame.url, f"{where}.url")


def _check_url(url: str | None, where: str) -> None:
    if url is None:
        raise InvalidParameter(f"`{where}` is required: a `data:` or `https:` URL.", param=where)
    if not url:
        raise InvalidParameter(f"`{where}` is empty: give a `data:` or `https:` URL.", param=where)


class Part(LenientModel):
    """One part of a message's content; the field that `type` names holds it.

    A picture or video with a `uuid` may be left out where it was sent before under that name.
    """

    type: Text
    text: Text | None = None
    image_url: ImageURL | None = None
    video_url: VideoURL | None = None
    image_embeds: (
        Annotated[
            Annotated[Text, Tag("string")] | Annotated[ImageEmbeds, Tag("object")], string_or_object(_embeds_kind)
        ]
        | None
    ) = None
    uuid: Label | None = None
    refusal: Text | None = None

    def check(self, role: str, where: str) -> None:
        if self.type in REFUSED_PARTS:
            raise UnsupportedParameter(
                f"`{where}` is of type {show(self.type)}, which is not supported. {REFUSED_PARTS[self.type]}",
                param=f"{where}.type",
            )
        if self.type not in _PART_TYPES:
            raise InvalidParameter(
                f"`{where}.type` must be one of {', '.join(_PART_TYPES)}; got {show(self.type)}.", param=f"{where}.type"
            )
        if role not in _PART_TYPES[self.type]:
            raise InvalidParameter(
                f"`{where}` is of type {self.type}, which messages of the {role} do not hold:"
                f" put it in one of the {_PART_TYPES[self.type][0]}.",
                param=where,
            )
        self._check_value(f"{where}.{self.type}")

    def _check_value(self, where: str) -> None:
        value, known = getattr(self, self.type), self.uuid is not None and self.type in _MEDIA_TYPES
        if value is None and not known:
            raise InvalidParameter(f"`{where}` is required.", param=where)
        if isinstance(value, (ImageURL, VideoURL)):
            value.check(where, known=known)
        elif isinstance(value, ImageEmbeds):
            value.check(where)
        elif self.type == "image_embeds" and not value and not known:
            raise InvalidParameter(f"`{where}` is empty: give the embeddings in base64.", param=where)

    def media(self, where: str) -> MediaPart | None:
        if self.type == "image_url":
            image = self.image_url or ImageURL()
            return MediaPart(
                kind="image",
                path=where,
                url=image.url or None,
                uuid=self.uuid,
                min_pixels=image.least,
                max_pixels=image.most,
            )
        if self.type == "image_embeds":
            return MediaPart(kind="image", path=where, content=self._embeddings(), uuid=self.uuid)
        return self._video(where) if self.type == "video_url" else None

    def _video(self, where: str) -> MediaPart:
        video = self.video_url or VideoURL()
        return MediaPart(
            kind="video",
            path=where,
            url=video.urls(),
            uuid=self.uuid,
            min_pixels=video.least,
            max_pixels=video.most,
            total_pixels=video.total_pixels,
            fps=video.fps,
            num_frames=video.num_frames,
        )

    def _embeddings(self) -> EncodedEmbeddings | None:
        if isinstance(self.image_embeds, ImageEmbeds):
            return EncodedEmbeddings(rows=self.image_embeds.image_embeds, grid=self.image_embeds.image_grid_thw)
        return EncodedEmbeddings(rows=self.image_embeds) if self.image_embeds else None

    def for_template(self) -> dict[str, str]:
        if self.type in {"text", "refusal"}:
            return {"type": "text", "text": getattr(self, self.type)}
        return {"type": self.type.partition("_")[0]}


_ROLES = ("user", "assistant", "system", "developer", "tool")
_MEDIA_TYPES = ("image_url", "video_url", "image_embeds")
_PART_TYPES = {"text": _ROLES, **dict.fromkeys(_MEDIA_TYPES, ("user", "tool")), "refusal": ("assistant",)}
"""Content parts, and the roles whose messages may hold them."""


class Function(LenientModel):
    name: Name
    arguments: Text


class ToolCall(LenientModel):
    """A call that the assistant made earlier in the conversation."""

    id: Name
    type: Literal["function"] = "function"
    function: Function

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}


_Parts: TypeAlias = Annotated[
    tuple[Part, ...], Strict(False), Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)
]


class Message(LenientModel):
    """One message; an assistant that called tools or refused need not have any `content`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Annotated[Text, Tag("string")] | Annotated[_Parts, Tag("array")], STRING_OR_ARRAY] | None = None
    name: Name | None = None
    refusal: Text | None = None
    tool_calls: Annotated[tuple[ToolCall, ...], Strict(False), Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] = ()
    tool_call_id: Name | None = None

    def check(self, where: str) -> None:
        for name, next_step in REFUSED_IN_MESSAGES.items():
            if name in (self.model_extra or {}):
                raise UnsupportedParameter(f"`{where}.{name}` is not supported. {next_step}", param=f"{where}.{name}")
        for name in ("tool_calls", "refusal"):
            if self.role != "assistant" and getattr(self, name):
                raise InvalidParameter(
                    f"`{where}.{name}` belongs in messages of the assistant only.", param=f"{where}.{name}"
                )
        if self.content is None and not self.tool_calls and self.refusal is None:
            raise InvalidParameter(
                f"`{where}.content` is required: a string, or an array of parts.", param=f"{where}.content"
            )
        for place, part in self.parts(where):
            part.check(self.role, place)

    def parts(self, where: str) -> list[tuple[str, Part]]:
        """The parts of the content, each with its place in the request; none if the content is a string."""
        parts = self.content if isinstance(self.content, tuple) else ()
        return [(f"{where}.content[{index}]", part) for index, part in enumerate(parts)]

    def for_template(self) -> dict[str, Any]:
        content: str | list[dict[str, str]]
        if isinstance(self.content, tuple):
            content = [part.for_template() for part in self.content]
        else:
            content = (self.refusal or "") if self.content is None else self.content
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        kept = {
            "name": self.name,
            "tool_calls": [call.for_template() for call in self.tool_calls],
            "tool_call_id": self.tool_call_id,
        }
        return message | {key: value for key, value in kept.items() if value}
