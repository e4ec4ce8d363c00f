"""What the model would see of a request: its pictures and frames after resizing, and what they cost in tokens."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image as PILImage

from ..media.types import Image, Kind, Media, Pixels, Video
from ..models.interface import Embedded, Grid, ImageProcessor, Patches

MAX_FRAMES = 16
"""Frames of one video that a preview shows."""

FASTEST = 1
"""zlib's level: the rest of a preview takes less time than its better levels do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One frame as the model sees it.

    Attributes:
        index: among the frames that the model sees, from 0.
        png: it, as a PNG file: no pixel is another than the vision tower's.
    """

    index: int
    png: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaPreview:
    """One picture or video as the model sees it.

    Attributes:
        kind: what it is.
        part: where it stands in the request.
        source_size: width and height before resizing, in pixels; None for embeddings.
        size: width and height of what the model sees, in pixels.
        grid: patches along time, height and width.
        cells: visual tokens along time, height and width.
        tokens: visual tokens.
        frame_count: frames that the model sees, those that a video is padded with included; 1 for a picture.
        times: seconds at which each frame of a video is shown, before any padding.
        frames: up to `MAX_FRAMES` of them, evenly chosen with the first and the last; none for embeddings.
    """

    kind: Kind
    path: str
    source_size: tuple[int, int] | None
    size: tuple[int, int]
    grid: Grid
    cells: tuple[int, int, int]
    tokens: int
    frame_count: int
    times: tuple[float, ...]
    frames: tuple[Frame, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    """What the model would see of a request.

    Attributes:
        items: its pictures and videos, in its order.
        prompt_tokens: of the whole prompt, with the visual ones.
        max_model_len: tokens that prompt and answer may have together.
    """

    items: tuple[MediaPreview, ...]
    prompt_tokens: int
    max_model_len: int


def preview_media(media: Media, item: Patches | Embedded, processor: ImageProcessor) -> MediaPreview:
    """Show one picture or video. What is shown is put together from the patches, so that it is what the model gets.

    Args:
        media: as it was decoded.
        item: what was cut from it.
        processor: what cut it.
    """
    frames = processor.frames(item) if isinstance(item, Patches) else None
    shape = processor.shape(item.grid)
    return MediaPreview(
        kind=item.kind,
        path=item.path,
        source_size=_source_size(media),
        size=(shape.width, shape.height),
        grid=item.grid,
        cells=shape.cells,
        tokens=item.tokens,
        frame_count=shape.frames if frames is None else len(frames),
        times=item.times,
        frames=() if frames is None else _chosen(frames),
    )


def _chosen(frames: Pixels) -> tuple[Frame, ...]:
    indices = np.linspace(0, len(frames) - 1, min(len(frames), MAX_FRAMES)).round().astype(int).tolist()
    return tuple(Frame(index=index, png=_png(frames[index])) for index in indices)


def _png(frame: Pixels) -> bytes:
    buffer = io.BytesIO()
    PILImage.fromarray(frame).save(buffer, "PNG", compress_level=FASTEST)
    return buffer.getvalue()


def _source_size(media: Media) -> tuple[int, int] | None:
    if isinstance(media, Image):
        return media.image.size
    return (media.frames.shape[2], media.frames.shape[1]) if isinstance(media, Video) else None
