"""The prompt layout of Qwen2.5-VL: that of Qwen2-VL, with the temporal positions of videos in units of time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dashinfer_vlm_core.media.types import VisualInput
from dashinfer_vlm_core.models.qwen2_vl.prompt_layout import Qwen2VLPromptLayout
from dashinfer_vlm_core.models.spec import ModelSpec

from .config import read_vision_config

DEFAULT_SECONDS_PER_GRID = 1.0
"""The published value for a video without times: 2 frames per second and 2 frames per patch."""


class Qwen25VLPromptLayout(Qwen2VLPromptLayout):
    """See `PromptLayout`."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._temporal_patch_size = spec.pixels.temporal_patch_size
        self._tokens_per_second = read_vision_config(spec.folder).tokens_per_second

    def times(self, visual: VisualInput) -> npt.NDArray[np.int64]:
        """Return the temporal position of each step of the grid: `tokens_per_second` times its seconds; images count 1.

        The product is rounded down in float32 like the published positions; in another precision, whole numbers could
        round to other integers. Source: the Qwen2.5-VL paper (arXiv:2502.13923, section 2.1.2) and transformers, where
        a step is called `second_per_grid_ts`.
        """
        if visual.kind == "image":
            return super().times(visual)
        fps = visual.sampled_fps
        seconds = DEFAULT_SECONDS_PER_GRID if fps is None else self._temporal_patch_size / fps
        interval = np.float32(self._tokens_per_second) * np.float32(seconds)
        times: npt.NDArray[np.float32] = super().times(visual).astype(np.float32) * interval
        return times.astype(np.int64)
