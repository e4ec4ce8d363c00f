"""Which frames of a video the model sees, and when each was shown."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from ..config import EngineConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoSamplingPolicy:
    """How a model's processor samples the frames of a video file. TorchKernels data, so that any process can apply it.

    The defaults are those of `smart_nframes` in qwen-vl-utils 0.0.14.

    Attributes:
        fps: frames per second that are sampled.
        min_frames: least frames, if the video has as many.
        max_frames: most frames.
        frame_factor: the number of frames is a multiple of this.
    """

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    frame_factor: int = 2

    def within(self, config: EngineConfig) -> VideoSamplingPolicy:
        """This policy with what the configuration sets in its place."""
        return replace(
            self,
            fps=config.video_fps or self.fps,
            min_frames=config.video_min_frames or self.min_frames,
            max_frames=config.video_max_frames or self.max_frames,
        )

    def count(self, total: int, fps: float, *, rate: float | None = None) -> int:
        """How many of `total` frames to sample.

        At `rate` or `self.fps` frames per second, but `min_frames` to `max_frames`, never more than there are, rounded
        down to a multiple of `frame_factor`. A video of fewer frames than that factor gives all of them.

        Args:
            total: frames of the video.
            fps: frames per second of the video.
            rate: frames per second that a request asks for.
        """
        factor = self.frame_factor
        if total < factor:
            return total
        least = math.ceil(self.min_frames / factor) * factor
        most = math.floor(min(self.max_frames, total) / factor) * factor
        wanted = total / fps * (rate or self.fps)
        return math.floor(min(max(wanted, least), most) / factor) * factor

    def indices(self, total: int, count: int) -> list[int]:
        """`count` frames evenly spread from the first of `total` frames to the last.

        They are those of `torch.linspace(0, total - 1, count).round()`, which qwen-vl-utils 0.0.14 takes: in float32,
        from both ends to the middle, with products that are rounded once. In long videos exact arithmetic would take
        others.
        """
        last = total - 1
        step = float(np.float32(last) / np.float32(max(count - 1, 1)))
        order = np.arange(count)
        spread = np.where(order < count // 2, step * order, last - step * (count - 1 - order))
        return [int(index) for index in spread.astype(np.float32).round()]

    def even_times(self, count: int) -> tuple[float, ...]:
        """Seconds at which `count` frames are shown that came as a list: they count as sampled at `fps`."""
        return tuple(index / self.fps for index in range(count))
