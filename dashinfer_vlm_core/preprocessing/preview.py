"""Preview the model's input: a request's images and frames after resizing, and their token counts."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image as PILImage

from ..media.types import Embeddings, Pixels, VisualInput
from ..models.coordinates import CoordinateSpec, ImageCoordinates
from ..models.interface import ImageProcessor, Patches

MAX_FRAMES = 16
"""Maximum frames of one video in a preview."""

PNG_COMPRESS_LEVEL = 1
"""zlib level; higher levels would take longer than the rest of a preview."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One frame as the model receives it.

    Attributes:
        index: index among the model's frames, starting at 0.
        png: a PNG file with exactly the pixels that the vision encoder receives.
    """

    index: int
    png: bytes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MediaPreview(VisualInput):
    """One image or video as the model receives it.

    Attributes:
        size: width and height after resizing, in pixels.
        cells: visual tokens along time, height and width.
        frame_count: number of frames, including padding frames of a video; 1 for an image.
        frames: up to `MAX_FRAMES` evenly spaced frames, including the first and the last; none for embeddings.
        coordinates: converts between pixels of the original and the model's coordinates; None if these are not known.
    """

    size: tuple[int, int]
    cells: tuple[int, int, int]
    frame_count: int
    frames: tuple[Frame, ...]
    coordinates: ImageCoordinates | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    """The model's input for a request.

    Attributes:
        items: the request's images and videos, in order.
        prompt_tokens: tokens of the whole prompt, including visual tokens.
        max_model_len: maximum tokens of prompt and completion together.
    """

    items: tuple[MediaPreview, ...]
    prompt_tokens: int
    max_model_len: int


def preview_media(
    item: Patches | Embeddings, processor: ImageProcessor, coordinates: CoordinateSpec | None = None
) -> MediaPreview:
    """Preview one image or video, reconstructed from its patches so that it shows the model's actual input.

    Args:
        item: its patches or embeddings.
        processor: the image processor that made the patches.
        coordinates: how the model writes positions in images.
    """
    frames = processor.frames(item) if isinstance(item, Patches) else None
    shape = processor.shape(item.grid)
    size = (shape.width, shape.height)
    return MediaPreview(
        **item.shared_fields(),
        size=size,
        cells=shape.cells,
        frame_count=shape.frames if frames is None else len(frames),
        frames=() if frames is None else _select_frames(frames),
        coordinates=coordinates.for_image(item.source_size, size) if coordinates and item.source_size else None,
    )


def _select_frames(frames: Pixels) -> tuple[Frame, ...]:
    indices = np.linspace(0, len(frames) - 1, min(len(frames), MAX_FRAMES)).round().astype(int).tolist()
    return tuple(Frame(index=index, png=_png(frames[index])) for index in indices)


def _png(frame: Pixels) -> bytes:
    buffer = io.BytesIO()
    PILImage.fromarray(frame).save(buffer, "PNG", compress_level=PNG_COMPRESS_LEVEL)
    return buffer.getvalue()
