"""The image processor of Qwen3-VL: images as in Qwen2-VL, and videos with limits for all of their frames together."""

from __future__ import annotations

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.media.types import Image, Video
from dashinfer_vlm_core.models.patches import frames_shape, limiting_frames, smart_resize
from dashinfer_vlm_core.models.qwen2_vl.image_processor import Qwen2VLImageProcessor, check_order
from dashinfer_vlm_core.models.spec import PixelLimits, PixelSpec

FRAME_TOKENS = 768
"""Default maximum number of visual tokens of a resized frame, as in qwen-vl-utils."""


class Qwen3VLImageProcessor(Qwen2VLImageProcessor):
    """See `ImageProcessor`.

    Args:
        spec: the preprocessing parameters of images.
        video: the checkpoint's limits of videos.
        config: the server's limits.

    Raises:
        ConfigError: `config.min_pixels` is above the maximum number of pixels.
    """

    def __init__(self, spec: PixelSpec, video: PixelLimits, config: EngineConfig) -> None:
        super().__init__(spec, config)
        self._video_min = video.min_pixels
        self._video_max = config.video_total_pixels or video.max_pixels
        self._frame_max = config.video_max_pixels or FRAME_TOKENS * spec.factor**2

    def size(self, media: Image | Video) -> tuple[int, int]:
        return super().size(media) if isinstance(media, Image) else self.frame_size(media)

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
        _, height, width = frames_shape(video)
        frame_max = min(video.max_pixels or self._frame_max, self._frame_max)
        check_order(PixelLimits(video.min_pixels or 0, frame_max), video)
        spec = self._spec
        span = spec.temporal_patch_size
        total = min(video.total_pixels or self._video_max, self._video_max)
        frames = max(limiting_frames(video), span)
        least = max(int(self._video_min * 1.05), video.min_pixels or 0)
        scale = max(1, spec.factor / min(height, width))
        return smart_resize(
            int(height * scale),
            int(width * scale),
            factor=spec.factor,
            min_pixels=max(self._video_min, (video.min_pixels or 0) * frames),
            max_pixels=max(min(frame_max, total // frames), least) * frames,
            path=video.path,
            frames=frames,
            padded_frames=round(frames / span) * span,
        )
