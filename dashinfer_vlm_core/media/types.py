"""Decoded media: what leaves this package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image as PILImage

Pixels: TypeAlias = npt.NDArray[np.uint8]
Kind: TypeAlias = Literal["image", "video"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Image:
    """One decoded picture, upright, in RGB.

    Attributes:
        image: of mode RGB, 8 bits a channel; Pillow's own, so that resizing starts without a copy.
        part: where it stands in the request, such as `messages[0].content[1]`.
        source: digest of what it was decoded from, where the part has a `uuid`.
        min_pixels: least pixels after resizing that the request asks for.
        max_pixels: most pixels after resizing that the request asks for.
    """

    image: PILImage.Image
    path: str
    source: bytes = b""
    min_pixels: int | None = None
    max_pixels: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Video:
    """The frames of one video that the model will see, upright, in RGB, all of one size.

    Attributes:
        frames: uint8 [frames, height, width, 3], at least one.
        part: where it stands in the request.
        times: seconds at which each frame is shown.
        source: as in `Picture`.
        min_pixels: least pixels of a frame after resizing that the request asks for.
        max_pixels: most pixels of a frame after resizing that the request asks for.
        total_pixels: most pixels of all frames together that the request asks for.
    """

    frames: Pixels
    path: str
    times: tuple[float, ...] = ()
    source: bytes = b""
    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Embeddings:
    """Visual tokens that the request brings along instead of pixels.

    Attributes:
        rows: float32 [tokens, hidden size], as they came: nothing but their type and number of axes is checked.
        grid: patches along time, height and width, at least 1 each.
        kind: what they are of.
        part: where they stand in the request.
        source: as in `Picture`.
    """

    rows: npt.NDArray[np.float32]
    grid: tuple[int, int, int]
    kind: Kind
    path: str
    source: bytes = b""


Media: TypeAlias = Image | Video | Embeddings

StopCheck: TypeAlias = Callable[[], None]
"""Called now and then by long work; raises once nobody waits for the result any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoInfo:
    """What the header of a video file says.

    Attributes:
        frames: number of frames.
        fps: average frames per second.
        width: of a stored frame, in pixels, before any rotation.
        height: of a stored frame, in pixels, before any rotation.
    """

    frames: int
    fps: float
    width: int
    height: int


class OpenVideo(Protocol):
    """One video file, opened."""

    @property
    def info(self) -> VideoInfo: ...

    def frames(self, indices: list[int], check_stop: StopCheck) -> Pixels:
        """The frames at `indices` (ascending), as uint8 [len(indices), height, width, 3].

        Args:
            indices: of frames, from 0.
            check_stop: to be called every few frames; let its error through.

        Raises:
            MediaUndecodable: the file ends early or is damaged.
        """


class VideoReader(Protocol):
    """Opens video files; a plugin registers one by `register_video_readers`.

    It sees whatever bytes a request calls a video: a reader decides by them, before a library does, whether they are
    of its formats. One that fails in another way than `MediaUndecodable` is named in the log, and the next is tried.

    Attributes:
        name: as listed by `dashinfer-vlm plugins`.
        priority: readers are tried from the highest to the lowest.
    """

    name: str
    priority: int

    def available(self) -> bool:
        """Whether its library is installed."""

    def open(self, data: bytes) -> OpenVideo:
        """Open an encoded video that is wholly in memory.

        Raises:
            MediaUndecodable: this reader cannot read it.
        """
