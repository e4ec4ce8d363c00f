"""The prompt layout of Qwen3-VL: the frames of a video are separate spans, each after its timestamp."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from dashinfer_vlm_core.media.types import VisualInput
from dashinfer_vlm_core.models.interface import Expansion, Placeholder, PlaceholderSpan
from dashinfer_vlm_core.models.qwen2_vl.prompt_layout import mrope_positions
from dashinfer_vlm_core.models.spec import ModelSpec

from .config import read_vision_tokens


class Qwen3VLPromptLayout:
    """See `PromptLayout`.

    Args:
        spec: the checkpoint.

    Raises:
        CheckpointError: `config.json` is missing or invalid.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._tokens = spec.tokens
        self._pixels = spec.pixels
        self._video = spec.video
        self._start, self._end = read_vision_tokens(spec.folder)
        self.placeholders: Sequence[Placeholder] = (
            Placeholder("image", (spec.tokens.image,)),
            # The published processor replaces the tokens around a video's placeholder, too.
            Placeholder("video", (self._start, spec.tokens.video, self._end)),
            Placeholder("video", (spec.tokens.video,)),
        )

    def expand(self, item: VisualInput, encode: Callable[[str], Sequence[int]]) -> Expansion:
        """Return the placeholders of an image, or for each pair of frames of a video its time, then its placeholders
        between the tokens that begin and end visual tokens. The first time is the leading text."""
        if item.kind == "image":
            return Expansion(np.full(item.tokens, self._tokens.image, np.int64), ((0, item.tokens),))
        token_ids: list[int] = []
        spans: list[tuple[int, int]] = []
        count = item.tokens // item.grid.t
        texts = [f"<{time:.1f} seconds>" for time in self.timestamps(item)]
        for index, text in enumerate(texts):
            token_ids += [*(encode(text) if index else ()), self._start]
            spans.append((len(token_ids), count))
            token_ids += [*[self._tokens.video] * count, self._end]
        return Expansion(np.array(token_ids, np.int64), tuple(spans), leading_text=texts[0])

    def timestamps(self, item: VisualInput) -> list[float]:
        """Return the time of each temporal patch in seconds: the mean of its first and last frame.

        Without timestamps, the frames are assumed to be sampled at the model's rate.
        """
        span = self._pixels.temporal_patch_size
        times = list(item.times)
        if not times:
            steps = item.steps or range(item.grid.t)
            even = self._video.even_times((steps[-1] + 1) * span)
            times = [time for step in steps for time in even[step * span : (step + 1) * span]]
        times += times[-1:] * (-len(times) % span)
        return [(times[index] + times[index + span - 1]) / 2 for index in range(0, len(times), span)]

    def positions(
        self, length: int, spans: Sequence[PlaceholderSpan], items: Sequence[VisualInput]
    ) -> npt.NDArray[np.int64]:
        """Return positions by the published rule; each span of a video is an image of its own."""
        grids = [items[span.item].grid._replace(t=1) for span in spans]
        return mrope_positions(length, spans, grids, merge=self._pixels.merge_size)
