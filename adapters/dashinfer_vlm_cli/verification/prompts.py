"""Prompts of random text, images and videos for a model of random weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image as PILImage
from torch import Tensor

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.decoders import DecodeRequest, Sampling, VisualSpan
from dashinfer_vlm_core.media import Image, Video
from dashinfer_vlm_core.models.interface import Patches, PlaceholderSpan, VisualTokens
from dashinfer_vlm_core.models.patches import with_digest

from .checkpoint import Checkpoint
from .models import ORDINARY, VISION_END, VISION_START

VIDEO_FPS = 2.0
"""transformers' default."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """Token ids and positions with images and videos; `name` is for the report."""

    name: str
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    items: tuple[Patches, ...]
    spans: tuple[PlaceholderSpan, ...]

    def request(self, embeddings: Sequence[Tensor], sampling: Sampling) -> DecodeRequest:
        """Return a request for a completion; `embeddings` are the visual tokens of the items."""
        visual = [
            VisualTokens.of(item, rows, digest=item.digest) for item, rows in zip(self.items, embeddings, strict=True)
        ]
        spans = tuple(
            VisualSpan(start=span.start, tokens=visual[span.item], row=span.row, length=span.length)
            for span in self.spans
        )
        return DecodeRequest(
            id=self.name, token_ids=self.token_ids, positions=self.positions, spans=spans, sampling=sampling
        )


class PromptBuilder:
    """Builds prompts of one model; text and pixels are random, and always the same."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        family = checkpoint.registry.family_of(checkpoint.folder)
        spec = family.load_spec(checkpoint.folder)
        self._processor = family.image_processor(spec, EngineConfig())
        self._layout = family.prompt_layout(spec)
        self._random = np.random.default_rng(0)

    def text(self, count: int) -> list[int]:
        tokens: list[int] = self._random.integers(0, ORDINARY, count).tolist()
        return tokens

    def image(self, height: int, width: int) -> Patches:
        return with_digest(
            self._processor.process(Image(image=PILImage.fromarray(self._pixels(height, width)), path="image"))
        )

    def video(self, count: int, height: int, width: int) -> Patches:
        times = tuple(index / VIDEO_FPS for index in range(count))
        frames = self._pixels(count, height, width)
        return with_digest(
            self._processor.process(Video(frames=frames, path="video", times=times, sampled_fps=VIDEO_FPS))
        )

    def prompt(self, name: str, *parts: list[int] | Patches) -> Prompt:
        """Concatenate parts: token ids of text, images and videos."""
        ids = list[int]()
        spans = list[PlaceholderSpan]()
        items = tuple(part for part in parts if isinstance(part, Patches))
        for part in parts:
            ids = self._append(ids, part, items.index(part), spans) if isinstance(part, Patches) else ids + part
        positions = self._layout.positions(len(ids), spans, items)
        return Prompt(
            name=name, token_ids=np.array(ids, np.int64), positions=positions, items=items, spans=tuple(spans)
        )

    def _append(self, ids: list[int], item: Patches, number: int, spans: list[PlaceholderSpan]) -> list[int]:
        """Return the tokens with those of an image or video, whose spans are added to `spans`."""
        expansion = self._layout.expand(item, _encode)
        # A placeholder of more than one token includes those around the visual tokens.
        is_framed = any(len(each.tokens) > 1 for each in self._layout.placeholders if each.kind == item.kind)
        begin = [*ids, *([] if is_framed else [VISION_START]), *_encode(expansion.leading_text)]
        row = 0
        for index, length in expansion.spans:
            spans.append(PlaceholderSpan(start=len(begin) + index, length=length, item=number, row=row))
            row += length
        return [*begin, *expansion.token_ids.tolist(), *([] if is_framed else [VISION_END])]

    def _pixels(self, *shape: int) -> npt.NDArray[np.uint8]:
        return self._random.integers(0, 256, (*shape, 3), dtype=np.uint8)


def _encode(text: str) -> list[int]:
    """Tokenize the timestamps of a video."""
    return list(map(ord, text))
