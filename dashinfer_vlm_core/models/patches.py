"""Building blocks of image processors: resize, patchify, unpatchify, content digests. Uses only numpy and Pillow."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image as PILImage

from ..errors import InvalidParameter
from ..media.image import MAX_ASPECT
from ..media.types import Embeddings, Grid, Image, Pixels, TokenCount, Video
from ..protocol.media_part import MediaPart
from .interface import GridShape, ImageProcessor, Patches
from .spec import ModelSpec, PixelSpec

MAX_EMBEDDING_MAGNITUDE = 65504.0
"""The largest finite float16, which a model may compute in."""


def validate_embeddings(media: Embeddings, spec: ModelSpec, processor: ImageProcessor) -> Embeddings:
    """Validate precomputed embeddings of a request; return them with their digest.

    Raises:
        InvalidParameter: the width is not the model's, the number of rows is not the grid's number of visual tokens, or
            a value is not finite or larger in magnitude than `MAX_EMBEDDING_MAGNITUDE`.
    """
    _check_rows(media, spec, processor)
    return replace(media, digest=content_digest(f"{media.kind} embeddings", media.grid, media.rows))


def _check_rows(media: Embeddings, spec: ModelSpec, processor: ImageProcessor) -> None:
    grid = media.grid
    rows = media.rows
    if rows.ndim != 2 or rows.shape[1] != spec.visual_width:
        raise InvalidParameter(
            f"The embeddings must have the shape [tokens, {spec.visual_width}] for this model, got {list(rows.shape)}.",
            param=media.path,
        )
    try:
        expected = processor.shape(grid).tokens
    except ValueError as error:
        raise InvalidParameter(
            f"The grid of the embeddings is not valid for this model: {error}.", param=media.path
        ) from None
    if len(rows) != expected:
        raise InvalidParameter(
            f"Embeddings for a grid of {grid.t} x {grid.h} x {grid.w} patches must have {expected} rows, got"
            f" {len(rows)}.",
            param=media.path,
        )
    if not np.abs(rows).max(initial=0) <= MAX_EMBEDDING_MAGNITUDE:  # also true for NaN
        raise InvalidParameter(
            f"The embeddings must be finite and at most {MAX_EMBEDDING_MAGNITUDE:g} in magnitude.", param=media.path
        )


def smart_resize(
    height: int,
    width: int,
    *,
    factor: int,
    min_pixels: int,
    max_pixels: int,
    path: str | None = None,
    frames: int = 1,
    padded_frames: int = 1,
) -> tuple[int, int]:
    """Compute the size that an image is resized to, or the frames of a video whose limits are those of all frames.

    Both sides are divisible by `factor`, the number of pixels is within the limits, and the aspect ratio is nearly
    preserved. The rule, including its order of rounding, is `smart_resize` of the published processor (transformers).

    Returns:
        (height, width) in pixels.

    Raises:
        InvalidParameter: one side is more than 200 times the other; `path` is the error's `param`.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise InvalidParameter(
            f"One side of {width} x {height} pixels is more than {MAX_ASPECT} times the other; crop it.", param=path
        )
    rows = round(height / factor) * factor
    columns = round(width / factor) * factor
    pixels = padded_frames * rows * columns
    if pixels > max_pixels:
        return _shrink(height, width, math.sqrt(frames * height * width / max_pixels), factor)
    if pixels < min_pixels:
        return _grow(height, width, math.sqrt(min_pixels / (frames * height * width)), factor)
    return rows, columns


def _shrink(height: int, width: int, divisor: float, factor: int) -> tuple[int, int]:
    rows = max(factor, math.floor(height / divisor / factor) * factor)
    columns = max(factor, math.floor(width / divisor / factor) * factor)
    return rows, columns


def _grow(height: int, width: int, scale: float, factor: int) -> tuple[int, int]:
    return math.ceil(height * scale / factor) * factor, math.ceil(width * scale / factor) * factor


def frames_shape(media: Image | Video) -> tuple[int, int, int]:
    """Return (frames, height, width) before resizing; an image is one frame."""
    if isinstance(media, Image):
        return 1, *(media.source_size or (media.image.height, media.image.width))
    frames, height, width, _ = media.frames.shape
    return (frames, *media.source_size) if media.source_size else (frames, height, width)


def limiting_frames(media: Image | Video) -> int:
    """Return the number of frames that the limits of a whole video are divided by.

    For an aligned video it is the next power of two, so that one more frame seldom changes the size of all.
    """
    frames = frames_shape(media)[0]
    return 1 << (frames - 1).bit_length() if isinstance(media, Video) and media.align else frames


def grid_for_size(frames: int, height: int, width: int, spec: PixelSpec) -> Grid:
    span = spec.temporal_patch_size
    return Grid(round_up(frames, span) // span, height // spec.patch_size, width // spec.patch_size)


def round_up(frames: int, span: int) -> int:
    return math.ceil(frames / span) * span


def grid_shape(grid: Grid, spec: PixelSpec) -> GridShape:
    """Return the tokens and pixels that a grid of patches corresponds to.

    Raises:
        ValueError: the grid is not divisible into whole visual tokens.
    """
    merge = spec.merge_size
    if min(grid) < 1 or grid.h % merge or grid.w % merge:
        raise ValueError(f"its height and width must be multiples of {merge}, and all its sides at least 1")
    return GridShape(
        cells=(grid.t, grid.h // merge, grid.w // merge),
        width=grid.w * spec.patch_size,
        height=grid.h * spec.patch_size,
        frames=grid.t * spec.temporal_patch_size,
    )


def resize(media: Image | Video, size: tuple[int, int]) -> Pixels:
    """Resize to `size` (height, width); returns uint8 [frames, height, width, 3]."""
    if isinstance(media, Image):
        return _scaled(media.image, size)[np.newaxis]
    if media.frames.shape[1:3] == size:
        return media.frames
    resized = np.empty((len(media.frames), *size, 3), dtype=np.uint8)
    for target, frame in zip(resized, media.frames, strict=True):
        target[:] = resize_frame(frame, size)
    return resized


def resize_frame(frame: Pixels, size: tuple[int, int]) -> Pixels:
    """Resize one frame, uint8 [height, width, 3], to `size` (height, width)."""
    return frame if frame.shape[:2] == size else _scaled(PILImage.fromarray(frame), size)


def _scaled(image: PILImage.Image, size: tuple[int, int]) -> Pixels:
    # Pillow does not resample an image that already has this size.
    height, width = size
    return np.asarray(image.resize((width, height), PILImage.Resampling.BICUBIC))


def patchify(frames: Pixels, spec: PixelSpec) -> tuple[Pixels, Grid]:
    """Split frames, uint8 [frames, height, width, 3], into patches; returns one row per patch, and the grid.

    The patches of a merge unit, which the vision encoder merges, are consecutive: rows are ordered by (time, unit row,
    unit column, row in the unit, column in the unit), and the values within a row by (channel, frame, y, x).
    """
    span = spec.temporal_patch_size
    side = spec.patch_size
    merge = spec.merge_size
    count, height, width, _ = frames.shape
    grid = grid_for_size(count, height, width, spec)
    missing = grid.t * span - count
    padded = np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)]) if missing else frames
    blocks = padded.reshape(grid.t, span, grid.h // merge, merge, side, grid.w // merge, merge, side, 3)
    ordered = blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return ordered.reshape(grid.patches, 3 * span * side * side), grid


def unpatchify(pixels: Pixels, grid: Grid, spec: PixelSpec) -> Pixels:
    """Restore the frames from rows as in `Patches.pixels`: uint8 [frames, height, width, 3], including padding."""
    span = spec.temporal_patch_size
    side = spec.patch_size
    merge = spec.merge_size
    blocks = pixels.reshape(grid.t, grid.h // merge, grid.w // merge, merge, merge, 3, span, side, side)
    ordered = blocks.transpose(0, 6, 1, 3, 7, 2, 4, 8, 5)
    frames: Pixels = ordered.reshape(grid.t * span, grid.h * side, grid.w * side, 3)
    return frames


def reduced(patches: Patches, part: MediaPart) -> Patches:
    """Return the patches with their digest, their pruning rate, and without temporal patches that hardly change."""
    if part.kind == "video" and part.min_change is not None:
        patches = drop_unchanged(patches, part.min_change)
    return with_digest(replace(patches, pruning_rate=part.pruning_rate or 0.0))


def least_tokens(tokens: int, part: MediaPart) -> TokenCount:
    """Return a lower bound of the visual tokens that `reduced` leaves of `tokens`."""
    if part.min_change is not None:
        return TokenCount(1, 1)  # one temporal patch: any of them may equal the first one
    return TokenCount(max(1, int(tokens * (1 - (part.pruning_rate or 0.0)))), tokens)


def drop_unchanged(patches: Patches, min_change: float) -> Patches:
    """Drop the temporal patches of a video in which the pixels of no visual token change on average by `min_change`
    from the last temporal patch that is kept; the first one is."""
    t = patches.grid.t
    count = patches.tokens // t
    frames = patches.pixels.reshape(t, count, -1)
    steps = [0]
    for step in range(1, t):
        change = np.abs(frames[step].astype(np.int16) - frames[steps[-1]])
        if change.mean(axis=-1).max() >= min_change:
            steps.append(step)
    if len(steps) == t:
        return patches
    span = math.ceil(len(patches.times) / t)
    return replace(
        patches,
        pixels=frames[steps].reshape(-1, patches.pixels.shape[1]),
        grid=patches.grid._replace(t=len(steps)),
        tokens=count * len(steps),
        times=tuple(time for step in steps for time in patches.times[step * span : (step + 1) * span]),
        steps=tuple(steps),
        dropped_tokens=count * (t - len(steps)),
    )


def with_digest(patches: Patches) -> Patches:
    """Return the patches with the digest of their content, and of a video with those of its temporal patches."""
    if patches.kind == "image":
        return replace(patches, digest=content_digest(patches.kind, patches.grid, patches.pixels))
    t, h, w = patches.grid
    frames = patches.pixels.reshape(t, h * w, -1)
    units = tuple(content_digest(patches.kind, Grid(1, h, w), frame) for frame in frames)
    digest = hashlib.sha256(f"{patches.kind} of {t} temporal patches".encode() + b"".join(units)).digest()
    return replace(patches, digest=digest, units=units)


def content_digest(kind: str, grid: Grid, rows: npt.NDArray[Any]) -> bytes:
    """Return a digest of 32 bytes. The header is preceded by its length, so that different inputs never collide."""
    header = f"{kind} {grid.t} {grid.h} {grid.w} {rows.shape[1]}".encode()
    digest = hashlib.sha256(len(header).to_bytes(8, "big") + header)
    digest.update(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
    return digest.digest()
