"""The image processor of Qwen3-VL: images as in Qwen2-VL, and videos with limits for all of their frames together."""

from __future__ import annotations

import functools
import math

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import InvalidParameter
from dashinfer_vlm_core.media.image import MAX_ASPECT
from dashinfer_vlm_core.media.types import FrameResizer, Grid, Image, Pixels, Video
from dashinfer_vlm_core.models.interface import GridShape, Patches
from dashinfer_vlm_core.models.patches import frames_shape, grid_for_size, grid_shape, patchify, resize, resize_frame
from dashinfer_vlm_core.models.qwen2_vl.image_processor import Qwen2VLImageProcessor
from dashinfer_vlm_core.models.spec import ModelSpec, PixelSpec

from .config import VideoPixels, read_video_pixels

FRAME_TOKENS = 768
"""Default maximum number of visual tokens of a resized frame, as in qwen-vl-utils."""


class Qwen3VLImageProcessor:
    """See `ImageProcessor`.

    Args:
        spec: the preprocessing parameters of images.
        video: the checkpoint's limits of videos.
        config: the server's limits.

    Raises:
        ConfigError: `config.min_pixels` is above the maximum number of pixels.
    """

    def __init__(self, spec: PixelSpec, video: VideoPixels, config: EngineConfig) -> None:
        self._spec = spec
        self._images = Qwen2VLImageProcessor(spec, config)
        self._video_min = video.min_pixels
        self._video_max = config.video_total_pixels or video.max_pixels
        self._frame_max = config.video_max_pixels or FRAME_TOKENS * spec.factor**2

    def process(self, media: Image | Video) -> Patches:
        """Resize (bicubic, with Pillow) and patchify an image or video.

        A video is padded with its last frame to a multiple of `temporal_patch_size`.

        Raises:
            InvalidParameter: the request's limits contradict each other or the server's, or the aspect ratio is above
                200.
        """
        if isinstance(media, Image):
            return self._images.process(media)
        pixels, grid = patchify(resize(media, self.frame_size(media)), self._spec)
        return Patches(
            pixels=pixels,
            grid=grid,
            tokens=grid_shape(grid, self._spec).tokens,
            kind="video",
            path=media.path,
            times=media.times,
        )

    def count_tokens(self, media: Image | Video) -> int:
        if isinstance(media, Image):
            return self._images.count_tokens(media)
        return grid_shape(grid_for_size(frames_shape(media)[0], *self.frame_size(media), self._spec), self._spec).tokens

    def frame_resizer(self, video: Video) -> FrameResizer:
        return functools.partial(resize_frame, size=self.frame_size(video))

    def frame_size(self, video: Video) -> tuple[int, int]:
        """Return (height, width) of the resized frames of a video, in pixels.

        The frames together have at least the checkpoint's minimum number of pixels, and at most `video_total_pixels` of
        the configuration or the checkpoint's maximum; a frame has at most `video_max_pixels` of the configuration, or
        the equivalent of 768 visual tokens. A request may lower the maximums, and raise the minimum of a frame. This is
        the rule of transformers' processor with `cap_pixels_per_frame`, which follows qwen-vl-utils.

        Raises:
            InvalidParameter: the request's limits contradict each other or the server's, or one side is more than 200
                times the other.
        """
        frames, height, width = frames_shape(video)
        frame_max = min(video.max_pixels or self._frame_max, self._frame_max)
        if (video.min_pixels or 0) > frame_max:
            name = "max_pixels" if video.min_pixels is None else "min_pixels"
            raise InvalidParameter(
                f"min_pixels ({video.min_pixels}) is above max_pixels ({frame_max}). Set both.",
                param=f"{video.options_path}.{name}",
            )
        total = min(video.total_pixels or self._video_max, self._video_max)
        frames = max(frames, self._spec.temporal_patch_size)
        least = max(int(self._video_min * 1.05), video.min_pixels or 0)
        return resized_video(
            frames,
            height,
            width,
            spec=self._spec,
            min_pixels=max(self._video_min, (video.min_pixels or 0) * frames),
            max_pixels=max(min(frame_max, total // frames), least) * frames,
            path=video.path,
        )

    def shape(self, grid: Grid) -> GridShape:
        return grid_shape(grid, self._spec)

    def frames(self, patches: Patches) -> Pixels:
        return self._images.frames(patches)


def resized_video(
    frames: int, height: int, width: int, *, spec: PixelSpec, min_pixels: int, max_pixels: int, path: str | None = None
) -> tuple[int, int]:
    """Compute the size that the frames of a video are resized to.

    Both sides are divisible by `spec.factor`, the pixels of all frames are within the limits, and the aspect ratio is
    nearly preserved. The rule, including its order of rounding, is `smart_resize` of transformers' Qwen3-VL processor.

    Returns:
        (height, width) in pixels.

    Raises:
        InvalidParameter: one side is more than 200 times the other; `path` is the error's `param`.
    """
    factor, span = spec.factor, spec.temporal_patch_size
    if min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise InvalidParameter(
            f"One side of the frames is more than {MAX_ASPECT} times the other; crop them.", param=path
        )
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    pixels = round(frames / span) * span * rows * columns
    if pixels > max_pixels:
        shrink = math.sqrt(frames * height * width / max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif pixels < min_pixels:
        grow = math.sqrt(min_pixels / (frames * height * width))
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    return rows, columns


def load_image_processor(spec: ModelSpec, config: EngineConfig) -> Qwen3VLImageProcessor:
    """Create the image processor of a checkpoint; see `ModelFamily.image_processor`."""
    return Qwen3VLImageProcessor(spec.pixels, read_video_pixels(spec.folder, spec.pixels), config)
