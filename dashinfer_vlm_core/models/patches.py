"""Media -> Patches: resize, and cut into the patches that the vision tower reads. numpy and Pillow, no torch."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from ..config import EngineConfig
from ..errors import ConfigError, InvalidParameter
from ..media.image import MAX_ASPECT
from ..media.types import Clip, Embeddings, Kind, Picture, Pixels
from .spec import ModelSpec, PixelSpec

DEFAULT_TOKENS = 1280
LARGEST_EMBEDDING = 65504.0
"""In magnitude: the largest number of float16, which a model may compute in."""


class Grid(NamedTuple):
    """Patches of one picture or video along time, height and width."""

    t: int
    h: int
    w: int

    @property
    def patches(self) -> int:
        return self.t * self.h * self.w


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Patches:
    """One picture or video, resized and cut, not yet normalised: the tower does that where it runs.

    Attributes:
        pixels: uint8 [t * h * w, 3 * temporal_patch_size * patch_size ** 2], in Qwen2-VL's patch order.
        grid: patches along time, height and width.
        tokens: visual tokens that the tower will make of them.
        kind: what they were.
        part: where it stands in the request.
        digest: 32 bytes; equal exactly for equal kind, grid and pixels.
    """

    pixels: npt.NDArray[np.uint8]
    grid: Grid
    tokens: int
    kind: Kind
    part: str
    digest: bytes


class Visual(Protocol):
    """What the prompt has to know of a picture or video."""

    @property
    def grid(self) -> Grid: ...

    @property
    def tokens(self) -> int: ...

    @property
    def kind(self) -> Kind: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Embedded:
    """Visual tokens that came ready-made, fit for the model.

    Attributes:
        rows: float32 [tokens, hidden size], finite.
        grid: patches along time, height and width.
        tokens: number of rows.
        kind: what they are of.
        part: where they stand in the request.
        digest: 32 bytes; equal exactly for equal kind, grid and rows.
    """

    rows: npt.NDArray[np.float32]
    grid: Grid
    tokens: int
    kind: Kind
    part: str
    digest: bytes


def embedded(media: Embeddings, spec: ModelSpec) -> Embedded:
    """Check visual tokens that a request brought along.

    Raises:
        InvalidParameter: they have not the model's width, not one row per merged patch of the grid, or a number that
            is not finite, or is beyond `LARGEST_EMBEDDING`.
    """
    rows, grid, merge = media.rows, Grid(*media.grid), spec.pixels.merge_size
    if rows.ndim != 2 or rows.shape[1] != spec.hidden_size:
        raise InvalidParameter(
            f"The embeddings must have the shape [tokens, {spec.hidden_size}] of this model.", param=media.part
        )
    if min(grid) < 1 or grid.h % merge or grid.w % merge or len(rows) != grid.patches // merge**2:
        raise InvalidParameter(
            f"Embeddings of a grid of {grid.t} x {grid.h} x {grid.w} patches have one row for each {merge} x {merge} of"
            f" them, and there are {len(rows)} rows.",
            param=media.part,
        )
    if not np.abs(rows).max(initial=0) <= LARGEST_EMBEDDING:  # nor where one is not a number
        raise InvalidParameter(
            f"The embeddings hold a number that is not finite, or beyond {LARGEST_EMBEDDING:g}.", param=media.part
        )
    return Embedded(
        rows=rows,
        grid=grid,
        tokens=len(rows),
        kind=media.kind,
        part=media.part,
        digest=_digest(f"{media.kind} embeddings", grid, rows),
    )


class PixelLimits(NamedTuple):
    """Least and most pixels (height times width) of a resized picture or frame."""

    least: int
    most: int


class Patcher:
    """Resizes and cuts media as one model wants them, within the limits of one engine. It keeps no state: any thread
    may call it.

    Args:
        spec: what the checkpoint says about pixels.
        config: the server's limits.

    Raises:
        ConfigError: `config.min_pixels` is above the most pixels allowed.
    """

    def __init__(self, spec: PixelSpec, config: EngineConfig) -> None:
        self._spec = spec
        self._config = config
        self._least = config.min_pixels or spec.min_pixels
        self._ceiling = config.max_pixels or spec.max_pixels
        if self._least > self._ceiling:
            raise ConfigError(f"min_pixels ({self._least}) is above max_pixels ({self._ceiling}); mend one of them.")

    def cut(self, media: Picture | Clip) -> Patches:
        """Resize (bicubic, by Pillow, as transformers' processor does) and cut.

        A clip is padded with its last frame to a multiple of `temporal_patch_size`; a picture is cut as a clip of one
        frame.

        Raises:
            InvalidParameter: limits that contradict each other or the server's, or an aspect ratio above 200.
        """
        size = self._size(media)
        pixels, grid = _cut(_resize(media, size), self._spec)
        kind: Kind = "image" if isinstance(media, Picture) else "video"
        return Patches(
            pixels=pixels,
            grid=grid,
            tokens=self._tokens(grid),
            kind=kind,
            part=media.part,
            digest=_digest(kind, grid, pixels),
        )

    def tokens(self, media: Picture | Clip) -> int:
        """The visual tokens that `cut` will give, by the size of the media alone: nothing is resized.

        Raises:
            InvalidParameter: as `cut`.
        """
        return self._tokens(_grid(_shape(media)[0], *self._size(media), self._spec))

    def limits(self, media: Picture | Clip) -> PixelLimits:
        """Pixels that a picture, or each frame of a clip, may have after resizing.

        A picture has at least `min_pixels` of the configuration or the checkpoint, and at most `max_pixels` of the
        configuration or what 1280 visual tokens show; a request may choose both. Its most is no more than `max_pixels`
        of the configuration or the checkpoint: whoever asks for at most so many gets fewer.

        For a frame, `fetch_video` of qwen-vl-utils computes the most, with an even number of frames:
        `max(min(video_max_pixels, total_pixels / frames * 2), int(min_pixels * 1.05))`. The request may lower it, and
        the checkpoint bounds it. The least is that of pictures; there it is always 128 tokens' worth, which would
        enlarge the clips of small models.

        Raises:
            InvalidParameter: the request's limits contradict each other or the server's; the error names one.
        """
        return self._picture_limits(media) if isinstance(media, Picture) else self._frame_limits(media)

    def _size(self, media: Picture | Clip) -> tuple[int, int]:
        """(height, width) in pixels after resizing."""
        limits = self.limits(media)
        _, height, width = _shape(media)
        return smart_resize(
            height,
            width,
            factor=self._spec.factor,
            min_pixels=limits.least,
            max_pixels=limits.most,
            part=media.part,
        )

    def _tokens(self, grid: Grid) -> int:
        return grid.patches // self._spec.merge_size**2

    def _picture_limits(self, picture: Picture) -> PixelLimits:
        default = min(self._ceiling, self._config.max_pixels or DEFAULT_TOKENS * self._spec.factor**2)
        most = min(picture.max_pixels or max(default, self._least), self._ceiling)
        limits = PixelLimits(picture.min_pixels or self._least, most)
        field = f"{picture.part}.image_url"
        _check_order(limits, field, picture)
        return limits

    def _frame_limits(self, clip: Clip) -> PixelLimits:
        field = f"{clip.part}.video_url"
        least = clip.min_pixels or self._least
        ceiling = max(self._least, min(self._config.video_max_pixels, self._spec.max_pixels))
        _check_order(PixelLimits(least, min(clip.max_pixels or ceiling, ceiling)), field, clip)
        span = self._spec.temporal_patch_size
        total = min(clip.total_pixels or self._config.video_total_pixels, self._config.video_total_pixels)
        share = total * span // _padded(len(clip.frames), span)
        most = max(min(self._config.video_max_pixels, share), int(least * 1.05))
        return PixelLimits(least, min(most, self._spec.max_pixels, clip.max_pixels or most))


def smart_resize(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int, part: str | None = None
) -> tuple[int, int]:
    """The size that Qwen2-VL gives a picture: sides divisible by `factor`, pixels within the limits, the aspect ratio
    nearly kept.

    The rule, its order of roundings included, is `smart_resize` of the published processor
    (transformers, `models/qwen2_vl/image_processing_qwen2_vl.py`).

    Returns:
        (height, width) in pixels.

    Raises:
        InvalidParameter: one side is more than 200 times the other; `part` names the picture.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise InvalidParameter(
            f"One side of {width} x {height} pixels is more than {MAX_ASPECT} times the other; crop it.", param=part
        )
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rows * columns < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    return rows, columns


def normalise(pixels: Pixels, spec: PixelSpec) -> npt.NDArray[np.float32]:
    """`(x / 255 - mean) / std` per channel, for rows as in `Patches.pixels`; float32 of the same shape."""
    mean, std = (np.array(values, dtype=np.float32)[:, np.newaxis] for values in (spec.mean, spec.std))
    channels = pixels.reshape(len(pixels), 3, -1).astype(np.float32)
    normal: npt.NDArray[np.float32] = ((channels / np.float32(255) - mean) / std).reshape(pixels.shape)
    return normal


def _check_order(limits: PixelLimits, field: str, media: Picture | Clip) -> None:
    if limits.least > limits.most:
        name = "max_pixels" if media.min_pixels is None else "min_pixels"
        raise InvalidParameter(
            f"min_pixels ({limits.least}) is above max_pixels ({limits.most}); set both.", param=f"{field}.{name}"
        )


def _shape(media: Picture | Clip) -> tuple[int, int, int]:
    """(frames, height, width); a picture is one frame."""
    if isinstance(media, Picture):
        return 1, media.image.height, media.image.width
    frames, height, width, _ = media.frames.shape
    return frames, height, width


def _grid(frames: int, height: int, width: int, spec: PixelSpec) -> Grid:
    span = spec.temporal_patch_size
    return Grid(_padded(frames, span) // span, height // spec.patch_size, width // spec.patch_size)


def _padded(frames: int, span: int) -> int:
    return math.ceil(frames / span) * span


def _resize(media: Picture | Clip, size: tuple[int, int]) -> Pixels:
    """uint8 [frames, *size, 3]."""
    if isinstance(media, Picture):
        return _scaled(media.image, size)[np.newaxis]
    if media.frames.shape[1:3] == size:
        return media.frames
    resized = np.empty((len(media.frames), *size, 3), dtype=np.uint8)
    for target, frame in zip(resized, media.frames, strict=True):
        target[:] = _scaled(Image.fromarray(frame), size)
    return resized


def _scaled(image: Image.Image, size: tuple[int, int]) -> Pixels:
    """uint8 [*size, 3]; a picture that has this size already is not resampled."""
    height, width = size
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))


def _cut(frames: Pixels, spec: PixelSpec) -> tuple[Pixels, Grid]:
    """uint8 [frames, height, width, 3] -> rows in the order of Qwen2-VL.

    Patches that the tower merges stand together, so that rows go (time, block row, block column, row and column in the
    block); within a row, values go (channel, frame, y, x).
    """
    span, side, merge = spec.temporal_patch_size, spec.patch_size, spec.merge_size
    count, height, width, _ = frames.shape
    grid = _grid(count, height, width, spec)
    padded = np.concatenate([frames, np.repeat(frames[-1:], grid.t * span - count, axis=0)])
    blocks = padded.reshape(grid.t, span, grid.h // merge, merge, side, grid.w // merge, merge, side, 3)
    ordered = blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return ordered.reshape(grid.patches, 3 * span * side * side), grid


def uncut(pixels: Pixels, grid: Grid, spec: PixelSpec) -> Pixels:
    """The frames that rows as in `Patches.pixels` were cut from: uint8 [frames, height, width, 3], padding included."""
    span, side, merge = spec.temporal_patch_size, spec.patch_size, spec.merge_size
    blocks = pixels.reshape(grid.t, grid.h // merge, grid.w // merge, merge, merge, 3, span, side, side)
    ordered = blocks.transpose(0, 6, 1, 3, 7, 2, 4, 8, 5)
    frames: Pixels = ordered.reshape(grid.t * span, grid.h * side, grid.w * side, 3)
    return frames


def _digest(what: str, grid: Grid, rows: npt.NDArray[Any]) -> bytes:
    """32 bytes; the header's own length stands first, so that no header and rows can be read as others."""
    header = f"{what} {grid.t} {grid.h} {grid.w} {rows.shape[1]}".encode()
    digest = hashlib.sha256(len(header).to_bytes(8, "big") + header)
    digest.update(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
    return digest.digest()
