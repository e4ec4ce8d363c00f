"""MediaPart: an image or video that a request refers to, before it is fetched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


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
class DocumentPage:
    """A page of a document that is to be rendered as an image.

    Attributes:
        file: the document.
        file_digest: digest of the document and of what renders it, in hexadecimal digits.
        number: the number of the page, from 1 on.
        size: height and width of the page in pixels, before the limits of images apply.
        dpi: pixels per inch that the request sets; None if it sets none.
        password: opens the document.
    """

    file: bytes = field(repr=False, compare=False)
    file_digest: str
    number: int
    size: tuple[int, int]
    dpi: int | None = None
    password: str | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaPart:
    """An image or video that a message refers to, not fetched yet.

    It is identified by `url`, `content` or `page`, or, if it was sent before under that name, by its `uuid` alone.

    Attributes:
        kind: the kind that the content part declares.
        path: its path in the request, such as `messages[0].content[1]`.
        url: the source, not empty and not validated otherwise. For a video it can be a tuple of its frames in order,
            each the URL of an image.
        content: the content itself: `EncodedEmbeddings`, or from a caller in this process any object that
            `media.python_objects` accepts for an image or video.
        page: the page of a document that is the image.
        uuid: the caller's name for it.
        min_pixels: minimum number of pixels (of each frame) after resizing, at least 1.
        max_pixels: maximum number of pixels (of each frame) after resizing, at least `min_pixels`.
        total_pixels: maximum number of pixels of all frames of a video together, at least 1.
        fps: frames per second, above 0: those to sample from a video file, or those that a list of frames was sampled
            at.
        num_frames: number of frames to sample from a video file, at least 1; never with `fps` or a list of frames.
        align: whether a video file is sampled at multiples of 1 / `fps` seconds, and the size of frames depends on
            their number in steps, so that videos that overlap share frames; never true with `num_frames`. None is
            false, unless the request sets it.
        min_change: the least change of a pair of frames, 0 to 255: the largest of the mean differences of the pixels of
            its visual tokens from the last pair before it. Other pairs are dropped. None keeps all.
        pruning_rate: share of the visual tokens that is dropped after the vision encoder, less than 1. None is 0, or
            the engine's rate for a video.
        background: red, green and blue of the background of transparent pixels.
        url_field: the field of the part with its URL, such as `input_video.data`; errors name it. None means
            `image_url.url` or `video_url.url`, and "" that the part is its URL.
    """

    kind: Literal["image", "video"]
    path: str
    url: str | tuple[str, ...] | None = None
    content: object = field(default=None, repr=False, compare=False)
    page: DocumentPage | None = None
    uuid: str | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None
    fps: float | None = None
    num_frames: int | None = None
    align: bool | None = None
    min_change: float | None = None
    pruning_rate: float | None = None
    background: tuple[int, int, int] | None = None
    url_field: str | None = field(default=None, compare=False)

    @property
    def has_source(self) -> bool:
        """Whether the request contains a source, rather than the `uuid` alone."""
        return self.url is not None or self.content is not None or self.page is not None

    @property
    def subject(self) -> Literal["image", "video", "document"]:
        """What it is part of for the user, as errors name it: a page belongs to a document."""
        return self.kind if self.page is None else "document"

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
