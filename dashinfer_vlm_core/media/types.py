"""Decoded media, the output of this package."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image as PILImage

from ..protocol.media_part import MediaPart, join_path

Pixels: TypeAlias = npt.NDArray[np.uint8]
Kind: TypeAlias = Literal["image", "video"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DecodedMedia:
    """What images and videos have in common: the options of their part.

    Attributes:
        path: its path in the request, such as `messages[0].content[1]`.
        min_pixels: minimum pixels after resizing, of each frame of a video.
        max_pixels: maximum pixels after resizing, of each frame of a video.
        options_field: the field of the part that has these options; empty if the part has them itself.
    """

    path: str
    min_pixels: int | None = None
    max_pixels: int | None = None
    options_field: str = ""

    @property
    def options_path(self) -> str:
        """The path of the object that has the options."""
        return join_path(self.path, self.options_field)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Image(DecodedMedia):
    """One decoded image, upright, in RGB.

    Attributes:
        image: a Pillow image of mode RGB with 8 bits per channel, so that resizing starts without a copy.
        source_size: height and width before resizing, in pixels, of a page that is rendered at its final size. Before
            it is rendered, `image` is empty.
    """

    image: PILImage.Image
    source_size: tuple[int, int] | None = None
    options_field: str = "image_url"

    @classmethod
    def of(cls, part: MediaPart, image: PILImage.Image) -> Image:
        """Return the image of a part."""
        return cls(
            image=image,
            path=part.path,
            min_pixels=part.min_pixels,
            max_pixels=part.max_pixels,
            options_field=part.options_field,
        )

    @classmethod
    def of_page(cls, part: MediaPart, image: PILImage.Image | None = None) -> Image:
        """Return the image of a page of a document, before or after it was rendered."""
        assert part.page is not None
        return replace(cls.of(part, image or PILImage.new("RGB", (1, 1))), source_size=part.page.size)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Video(DecodedMedia):
    """The sampled frames of one video, upright, in RGB, all of one size.

    Attributes:
        frames: uint8 [frames, height, width, 3], at least one.
        times: timestamp of each frame in seconds.
        sampled_fps: number of frames divided by the duration of the video in seconds; None if it is not known.
        total_pixels: maximum pixels of all frames together that the request sets.
        align: whether the size of the frames depends on their number in steps.
        source_size: height and width before resizing, in pixels, if the frames were resized while they were decoded.
    """

    frames: Pixels
    times: tuple[float, ...] = ()
    sampled_fps: float | None = None
    total_pixels: int | None = None
    align: bool = False
    source_size: tuple[int, int] | None = None
    options_field: str = "video_url"


class Grid(NamedTuple):
    """Number of patches of one image or video along time, height and width."""

    t: int
    h: int
    w: int

    @property
    def patches(self) -> int:
        return self.t * self.h * self.w


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Numbers of visual tokens of an item, or of all items of a request.

    Attributes:
        kept: those that the language model receives.
        encoded: those that the vision encoder produces.
    """

    kept: int
    encoded: int

    def __add__(self, other: TokenCount) -> TokenCount:
        return TokenCount(self.kept + other.kept, self.encoded + other.encoded)

    def __sub__(self, other: TokenCount) -> TokenCount:
        return TokenCount(self.kept - other.kept, self.encoded - other.encoded)

    def exceeds(self, limit: TokenCount) -> bool:
        return self.kept > limit.kept or self.encoded > limit.encoded


NO_TOKENS = TokenCount(0, 0)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VisualInput:
    """One image or video as input of the model: all that the prompt depends on.

    The subclasses add its values: `Patches` its pixels, `Embeddings` and `VisualTokens` its embedding.

    Attributes:
        kind: image or video.
        path: the path of its field in the request.
        grid: patches along time, height and width, at least 1 each.
        tokens: number of visual tokens.
        digest: 32 bytes; equal if and only if kind, grid and values are equal. The engine sets it: an image processor
            runs in a process that opens untrusted files, and must not choose the key of a shared cache.
        units: digests of the temporal patches of a video with pixels, in order, as the engine sets them: equal if and
            only if height and width of the grid and the pixels are equal. Empty for other items.
        times: timestamps of a video's frames in seconds, without padding; empty for an image, or if they are not known.
            They are not part of the digest: the same frames at other times have the same embedding but a different
            prompt.
        sampled_fps: number of a video's frames, without padding, divided by its duration in seconds; None for an image,
            or if it is not known. Not part of the digest either.
        source_size: width and height before resizing, in pixels, which the engine sets; None for embeddings.
        source_digest: digest of the encoded data, or of a Python object's pixels; empty if the part has no `uuid`.
        steps: indices of a video's temporal patches before those that had hardly changed were dropped; empty if none
            were.
        dropped_tokens: number of visual tokens of these.
        pruning_rate: share of the visual tokens that the language model does not receive, less than 1.
        kept_rows: int64, ascending indices of the visual tokens that it receives; None before the vision encoder, or if
            it receives all.
    """

    kind: Kind
    path: str
    grid: Grid
    tokens: int
    digest: bytes = b""
    units: tuple[bytes, ...] = ()
    times: tuple[float, ...] = ()
    sampled_fps: float | None = None
    source_size: tuple[int, int] | None = None
    source_digest: bytes = b""
    steps: tuple[int, ...] = ()
    dropped_tokens: int = 0
    pruning_rate: float = 0.0
    kept_rows: npt.NDArray[np.int64] | None = None

    @property
    def kept_tokens(self) -> int:
        """Number of visual tokens that the language model receives; those of a video include its first frames."""
        least = self.tokens // self.grid.t if self.kind == "video" else 1
        return max(least, int(self.tokens * (1 - self.pruning_rate)))

    @property
    def token_count(self) -> TokenCount:
        return TokenCount(self.kept_tokens, self.tokens)

    @property
    def pruned_tokens(self) -> int:
        """Number of visual tokens that it does not receive."""
        return self.dropped_tokens + self.tokens - self.kept_tokens

    def shared_fields(self) -> dict[str, Any]:
        """Return the fields that all subclasses have."""
        return {field.name: getattr(self, field.name) for field in fields(VisualInput)}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Embeddings(VisualInput):
    """Visual tokens that the request contains instead of pixels.

    Attributes:
        rows: float32 [tokens, hidden size].
    """

    rows: npt.NDArray[np.float32]


Media: TypeAlias = Image | Video | Embeddings

FrameResizer: TypeAlias = Callable[[Pixels], Pixels]
"""Resizes one frame, uint8 [height, width, 3]."""

ResizerFactory: TypeAlias = Callable[[Video], FrameResizer]
"""Returns the resizer for the frames of a video, of which only the size and the options matter."""

StopCheck: TypeAlias = Callable[[], None]
"""Called regularly by long-running work; raises once the result is no longer needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoInfo:
    """The header of a video file.

    Attributes:
        frames: number of frames.
        fps: average frames per second.
        width: width of a stored frame in pixels, before any rotation.
        height: height of a stored frame in pixels, before any rotation.
    """

    frames: int
    fps: float
    width: int
    height: int


class OpenVideo(Protocol):
    """An open video file."""

    @property
    def info(self) -> VideoInfo: ...

    def frames(self, indices: list[int], check_stop: StopCheck) -> Iterable[Pixels]:
        """Decode the frames at `indices` (ascending), each uint8 [height, width, 3].

        Each frame is resized before the next one is decoded, so that a generator never has a video at full size in
        memory.

        Args:
            indices: frame indices, starting at 0.
            check_stop: must be called every few frames; its exception must propagate.

        Raises:
            MediaUndecodable: the file ends early or is damaged.
        """


class VideoReader(ABC):
    """Opens video files; plugins register readers with `register_video_readers`.

    A reader receives any bytes that a request declares a video, so it must check the signature of its formats before it
    calls a library. After `MediaUndecodable`, the next reader is tried. Other `RequestError` and `EngineError`
    exceptions propagate. Any other exception is logged, and the next reader is tried.

    Attributes:
        name: shown by `dashinfer-vlm plugins`, and selected by `video_reader`.
        priority: readers are tried from the highest priority to the lowest.
        requirements: its libraries, as arguments of pip, such as `av>=14`; shown if one is not installed.
        may_crash: whether a damaged file can crash the process. Such a reader is used only in media workers, and only
            if the option `video_reader` names it.
    """

    name: str
    priority: int
    requirements: tuple[str, ...] = ()
    may_crash: bool = False

    @abstractmethod
    def available(self) -> bool:
        """Whether the reader's library is installed."""

    def preload(self) -> None:  # noqa: B027  not every library needs it
        """Import the library before workers are forked; this must start no threads."""

    @abstractmethod
    def open(self, data: bytes) -> OpenVideo:
        """Open an encoded video in memory. In a media worker, this can allocate 128 MiB and the size of the file.

        Raises:
            MediaUndecodable: this reader cannot read it.
        """
