"""Decoded media -> Patches, as Qwen2-VL's processor and qwen-vl-utils do it."""

from __future__ import annotations

from typing import NamedTuple

from ...config import EngineConfig
from ...errors import ConfigError, InvalidParameter
from ...media.types import Image, Kind, Pixels, Video
from ..interface import Grid, GridShape, Patches
from ..patches import (
    content_digest,
    frames_shape,
    grid_of,
    grid_shape,
    padded,
    patchify,
    resize,
    smart_resize,
    unpatchify,
)
from ..spec import PixelSpec

DEFAULT_TOKENS = 1280
"""Most visual tokens of an image, where nobody asks for another number."""

VIDEO_MAX_PIXELS = 768 * 28 * 28
VIDEO_TOTAL_PIXELS = 16384 * 28 * 28


class PixelLimits(NamedTuple):
    """Least and most pixels (height times width) of a resized picture or frame."""

    min_pixels: int
    max_pixels: int


class Qwen2VLImageProcessor:
    """See `ImageProcessor`.

    Args:
        spec: what the checkpoint says about pixels.
        config: the server's limits.

    Raises:
        ConfigError: `config.min_pixels` is above the most pixels allowed.
    """

    def __init__(self, spec: PixelSpec, config: EngineConfig) -> None:
        self._spec = spec
        self._config = config
        self._frame_most = config.video_max_pixels or VIDEO_MAX_PIXELS
        self._video_most = config.video_total_pixels or VIDEO_TOTAL_PIXELS
        self._least = config.min_pixels or spec.min_pixels
        self._ceiling = config.max_pixels or spec.max_pixels
        if self._least > self._ceiling:
            raise ConfigError(f"min_pixels ({self._least}) is above max_pixels ({self._ceiling}); mend one of them.")

    def process(self, media: Image | Video) -> Patches:
        """Resize (bicubic, by Pillow, as transformers' processor does) and cut.

        A clip is padded with its last frame to a multiple of `temporal_patch_size`; a picture is cut as a clip of one
        frame.

        Raises:
            InvalidParameter: limits that contradict each other or the server's, or an aspect ratio above 200.
        """
        size = self._size(media)
        pixels, grid = patchify(resize(media, size), self._spec)
        kind: Kind = "image" if isinstance(media, Image) else "video"
        return Patches(
            pixels=pixels,
            grid=grid,
            tokens=grid_shape(grid, self._spec).tokens,
            kind=kind,
            path=media.path,
            digest=content_digest(kind, grid, pixels),
            times=media.times if isinstance(media, Video) else (),
        )

    def count_tokens(self, media: Image | Video) -> int:
        """The visual tokens that `process` will give, by the size of the media alone: nothing is resized.

        Raises:
            InvalidParameter: as `process`.
        """
        return grid_shape(grid_of(frames_shape(media)[0], *self._size(media), self._spec), self._spec).tokens

    def limits(self, media: Image | Video) -> PixelLimits:
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
        return self._picture_limits(media) if isinstance(media, Image) else self._frame_limits(media)

    def _size(self, media: Image | Video) -> tuple[int, int]:
        """(height, width) in pixels after resizing."""
        limits = self.limits(media)
        _, height, width = frames_shape(media)
        return smart_resize(
            height,
            width,
            factor=self._spec.factor,
            min_pixels=limits.min_pixels,
            max_pixels=limits.max_pixels,
            part=media.path,
        )

    def _picture_limits(self, image: Image) -> PixelLimits:
        default = min(self._ceiling, self._config.max_pixels or DEFAULT_TOKENS * self._spec.factor**2)
        most = min(image.max_pixels or max(default, self._least), self._ceiling)
        limits = PixelLimits(image.min_pixels or self._least, most)
        field = f"{image.path}.image_url"
        _check_order(limits, field, image)
        return limits

    def _frame_limits(self, video: Video) -> PixelLimits:
        field = f"{video.path}.video_url"
        least = video.min_pixels or self._least
        ceiling = max(self._least, min(self._frame_most, self._spec.max_pixels))
        _check_order(PixelLimits(least, min(video.max_pixels or ceiling, ceiling)), field, video)
        span = self._spec.temporal_patch_size
        total = min(video.total_pixels or self._video_most, self._video_most)
        share = total * span // padded(len(video.frames), span)
        most = max(min(self._frame_most, share), int(least * 1.05))
        return PixelLimits(least, min(most, self._spec.max_pixels, video.max_pixels or most))

    def shape(self, grid: Grid) -> GridShape:
        return grid_shape(grid, self._spec)

    def frames(self, patches: Patches) -> Pixels:
        frames = unpatchify(patches.pixels, patches.grid, self._spec)
        return frames[:1] if patches.kind == "image" else frames


def _check_order(limits: PixelLimits, field: str, media: Image | Video) -> None:
    if limits.min_pixels > limits.max_pixels:
        name = "max_pixels" if media.min_pixels is None else "min_pixels"
        raise InvalidParameter(
            f"min_pixels ({limits.min_pixels}) is above max_pixels ({limits.max_pixels}); set both.",
            param=f"{field}.{name}",
        )
