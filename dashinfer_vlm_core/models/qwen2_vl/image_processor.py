"""The image processor of Qwen2-VL: converts decoded media to `Patches` like transformers and qwen-vl-utils."""

from __future__ import annotations

import functools

from ...config import EngineConfig
from ...errors import ConfigError, InvalidParameter
from ...media.types import FrameResizer, Grid, Image, Kind, Pixels, Video
from ..interface import GridShape, Patches
from ..patches import (
    frames_shape,
    grid_for_size,
    grid_shape,
    limiting_frames,
    patchify,
    resize,
    resize_frame,
    round_up,
    smart_resize,
    unpatchify,
)
from ..spec import PixelLimits, PixelSpec

DEFAULT_TOKENS = 1280
"""Default maximum number of visual tokens of an image."""

VIDEO_MAX_PIXELS = 768 * 28 * 28
VIDEO_TOTAL_PIXELS = 16384 * 28 * 28


class Qwen2VLImageProcessor:
    """See `ImageProcessor`.

    Args:
        spec: the checkpoint's preprocessing parameters.
        config: the server's limits.

    Raises:
        ConfigError: `config.min_pixels` is above the maximum number of pixels.
    """

    def __init__(self, spec: PixelSpec, config: EngineConfig) -> None:
        self._spec = spec
        self._config = config
        self._frame_max = config.video_max_pixels or VIDEO_MAX_PIXELS
        self._video_max = config.video_total_pixels or VIDEO_TOTAL_PIXELS
        self._min_pixels = config.min_pixels or spec.min_pixels
        self._max_pixels = config.max_pixels or spec.max_pixels
        if self._min_pixels > self._max_pixels:
            raise ConfigError(
                f"min_pixels ({self._min_pixels}) is above max_pixels ({self._max_pixels}). Change one of them."
            )

    def process(self, media: Image | Video) -> Patches:
        """Resize (bicubic, with Pillow, like transformers' processor) and patchify an image or video.

        A video is padded with its last frame to a multiple of `temporal_patch_size`; an image is processed as a video
        of one frame.

        Raises:
            InvalidParameter: the request's limits contradict each other or the server's, or the aspect ratio is above
                200.
        """
        size = self.size(media)
        pixels, grid = patchify(resize(media, size), self._spec)
        kind: Kind = "image" if isinstance(media, Image) else "video"
        return Patches(
            pixels=pixels,
            grid=grid,
            tokens=grid_shape(grid, self._spec).tokens,
            kind=kind,
            path=media.path,
            times=media.times if isinstance(media, Video) else (),
            sampled_fps=media.sampled_fps if isinstance(media, Video) else None,
        )

    def count_tokens(self, media: Image | Video) -> int:
        """Return the number of visual tokens that `process` would produce, from the size alone, without resizing.

        Raises:
            InvalidParameter: as for `process`.
        """
        return grid_shape(grid_for_size(frames_shape(media)[0], *self.size(media), self._spec), self._spec).tokens

    def frame_resizer(self, video: Video) -> FrameResizer:
        return functools.partial(resize_frame, size=self.size(video))

    def limits(self, media: Image | Video) -> PixelLimits:
        """Return the pixel limits of a resized image, or of each resized frame of a video.

        For an image, the minimum is `min_pixels` of the configuration or the checkpoint, and the maximum is
        `max_pixels` of the configuration or the equivalent of 1280 visual tokens. A request may override both, but a
        larger maximum is clamped to `max_pixels` of the configuration or the checkpoint.

        For a frame, the maximum is that of `fetch_video` in qwen-vl-utils, with an even number of frames:
        `max(min(video_max_pixels, total_pixels / frames * 2), int(min_pixels * 1.05))`. The request may lower it, and
        the checkpoint bounds it. The minimum is that of images; in qwen-vl-utils it is always equivalent to 128 tokens,
        which would enlarge the videos of small models.

        Raises:
            InvalidParameter: the request's limits contradict each other or the server's; the error names the field.
        """
        return self._image_limits(media) if isinstance(media, Image) else self._frame_limits(media)

    def size(self, media: Image | Video) -> tuple[int, int]:
        limits = self.limits(media)
        _, height, width = frames_shape(media)
        return smart_resize(
            height,
            width,
            factor=self._spec.factor,
            min_pixels=limits.min_pixels,
            max_pixels=limits.max_pixels,
            path=media.path,
        )

    def _image_limits(self, image: Image) -> PixelLimits:
        default = min(self._max_pixels, self._config.max_pixels or DEFAULT_TOKENS * self._spec.factor**2)
        max_pixels = min(image.max_pixels or max(default, self._min_pixels), self._max_pixels)
        limits = PixelLimits(image.min_pixels or self._min_pixels, max_pixels)
        check_order(limits, image)
        return limits

    def _frame_limits(self, video: Video) -> PixelLimits:
        min_pixels = video.min_pixels or self._min_pixels
        frame_max = max(self._min_pixels, min(self._frame_max, self._spec.max_pixels))
        check_order(PixelLimits(min_pixels, min(video.max_pixels or frame_max, frame_max)), video)
        span = self._spec.temporal_patch_size
        total = min(video.total_pixels or self._video_max, self._video_max)
        share = total * span // round_up(limiting_frames(video), span)
        max_pixels = max(min(self._frame_max, share), int(min_pixels * 1.05))
        return PixelLimits(min_pixels, min(max_pixels, self._spec.max_pixels, video.max_pixels or max_pixels))

    def shape(self, grid: Grid) -> GridShape:
        return grid_shape(grid, self._spec)

    def frames(self, patches: Patches) -> Pixels:
        frames = unpatchify(patches.pixels, patches.grid, self._spec)
        return frames[:1] if patches.kind == "image" else frames


def check_order(limits: PixelLimits, media: Image | Video) -> None:
    """Check that the minimum is not above the maximum.

    Raises:
        InvalidParameter: it is; the error names the field of the request.
    """
    if limits.min_pixels <= limits.max_pixels:
        return
    problem = f"min_pixels ({limits.min_pixels}) is above max_pixels ({limits.max_pixels})."
    name = "max_pixels" if media.min_pixels is None else "min_pixels"
    if media.options_field != "file":
        raise InvalidParameter(f"{problem} Set both.", param=f"{media.options_path}.{name}")
    # A file has no `min_pixels`, and only a page of a document has `max_pixels`.
    if isinstance(media, Image) and media.source_size and media.max_pixels == limits.max_pixels:
        raise InvalidParameter(
            f"{problem} Set `max_pixels` to at least {limits.min_pixels}.", param=f"{media.options_path}.max_pixels"
        )
    raise InvalidParameter(f"{problem} Lower the minimum in `mm_processor_kwargs`.", param=media.options_path)
