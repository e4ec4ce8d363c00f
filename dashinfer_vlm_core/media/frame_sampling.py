"""Select the frames of a video that the model receives, and their timestamps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ..config import EngineConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoSamplingPolicy:
    """How a model's processor samples the frames of a video file; plain data that any process can apply.

    The defaults are those of `smart_nframes` in qwen-vl-utils 0.0.14.

    Attributes:
        fps: sampled frames per second.
        min_frames: minimum number of frames, if the video has as many.
        max_frames: maximum number of frames.
        frame_factor: the number of frames is a multiple of this.
        precision: the precision in which `indices` are computed.
    """

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    frame_factor: int = 2
    precision: Literal["float32", "float64"] = "float32"

    def with_config(self, config: EngineConfig) -> VideoSamplingPolicy:
        """Return this policy with the values that the configuration overrides."""
        return replace(
            self,
            fps=config.video_fps or self.fps,
            max_frames=config.video_max_frames or self.max_frames,
        )

    def count(self, total: int, video_fps: float, *, fps: float | None = None) -> int:
        """Return how many of `total` frames to sample.

        The video is sampled at `fps`, or else `self.fps`, frames per second. The count is clamped to `min_frames` and
        `max_frames`, never exceeds `total`, and is rounded down to a multiple of `frame_factor`. All frames are used
        if the video has fewer than `frame_factor`.

        Args:
            total: frames of the video.
            video_fps: frames per second of the video.
            fps: frames per second to sample, as set by the request.
        """
        factor = self.frame_factor
        if total < factor:
            return total
        min_count = math.ceil(self.min_frames / factor) * factor
        max_count = math.floor(min(self.max_frames, total) / factor) * factor
        count = total / video_fps * (fps or self.fps)
        return math.floor(min(max(count, min_count), max_count) / factor) * factor

    def indices(self, total: int, count: int) -> list[int]:
        """Return `count` indices evenly spaced from the first of `total` frames to the last.

        In float32, they equal `torch.linspace(0, total - 1, count).round()`, which qwen-vl-utils 0.0.14 uses: computed
        from both ends to the middle, with products rounded once. In float64, they equal `numpy.linspace`, which
        transformers uses for Qwen3-VL. For long videos exact arithmetic would select other frames.
        """
        if self.precision == "float64":
            return [int(index) for index in np.linspace(0, total - 1, count).round()]
        last = total - 1
        step = float(np.float32(last) / np.float32(max(count - 1, 1)))
        order = np.arange(count)
        spread = np.where(order < count // 2, step * order, last - step * (count - 1 - order))
        return [int(index) for index in spread.astype(np.float32).round()]

    def aligned_indices(self, total: int, step: float) -> list[int]:
        """Return the indices of the frames nearest to the multiples of `step` frames, at least 1. Those of a longer
        video begin with them."""
        count = math.ceil((total - 0.5) / step)
        return [min(math.floor(number * step + 0.5), total - 1) for number in range(count)]

    def even_times(self, count: int, *, fps: float | None = None) -> tuple[float, ...]:
        """Return timestamps in seconds for a list of `count` frames, sampled at `fps`, or else `self.fps`."""
        return tuple(index / (fps or self.fps) for index in range(count))
