"""A batch of prompts for a tiny model: texts, images and a video, of different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image as PILImage
from torch import Tensor

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.decoders import DecodeRequest, Sampling, VisualSpan
from dashinfer_vlm_core.media import Image, Video
from dashinfer_vlm_core.models.interface import Patches, PlaceholderSpan, PromptLayout, VisualTokens
from dashinfer_vlm_core.models.patches import with_digest
from dashinfer_vlm_core.plugins import Registry

from .tiny_models import ORDINARY, VISION_END, VISION_START

VIDEO_FPS = 4.0
"""Frames per second of the video. With the 2 positions per second of the tiny Qwen2.5-VL, its frames advance by 1."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TinyPrompt:
    """One prompt of text, images and videos.

    Attributes:
        name: what is in it, for the report.
        token_ids: int64 [length].
        positions: int64 [3, length].
        items: images and videos, in prompt order.
        spans: the placeholders of the items.
    """

    name: str
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    items: tuple[Patches, ...]
    spans: tuple[PlaceholderSpan, ...]

    def request(self, embeddings: Sequence[Tensor], sampling: Sampling) -> DecodeRequest:
        """Return a request for a completion; `embeddings` are the visual tokens of the items."""
        visual = [
            VisualTokens(embedding=rows, grid=item.grid, digest=item.digest)
            for item, rows in zip(self.items, embeddings, strict=True)
        ]
        return DecodeRequest(
            id=self.name,
            token_ids=self.token_ids,
            positions=self.positions,
            spans=tuple(
                VisualSpan(start=span.start, tokens=visual[span.item], row=span.row, length=span.length)
                for span in self.spans
            ),
            sampling=sampling,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptSet:
    """The prompts of a tiny model.

    Attributes:
        batch: prompts that are decoded at the same time.
        image: the one of `batch` that begins with an image.
        other_text: the same image, and then another text.
        other_image: the text of `image` after another image of the same size.
    """

    batch: tuple[TinyPrompt, ...]
    image: TinyPrompt
    other_text: TinyPrompt
    other_image: TinyPrompt


class PromptBuilder:
    """Builds prompts of one tiny model; text and pixels are random, and always the same."""

    def __init__(self, registry: Registry, folder: Path) -> None:
        family = registry.family_of(folder)
        spec = family.load_spec(folder)
        self._processor = family.image_processor(spec, EngineConfig())
        self._layout: PromptLayout = family.prompt_layout(spec)
        self._random = np.random.default_rng(0)

    def build(self) -> PromptSet:
        """Return a short text, a text of several prefill chunks, one image, two images of other sizes, and a video."""
        image, other, text = self._image(168, 224), self._image(168, 224), self._text(9)
        first = self._prompt("image", image, text)
        batch = (
            self._prompt("text", self._text(12)),
            self._prompt("long text", self._text(150)),
            first,
            self._prompt(
                "two images", self._text(3), self._image(84, 140), self._text(4), self._image(224, 112), self._text(6)
            ),
            self._prompt("video", self._text(4), self._video(6, 112, 140), self._text(7)),
        )
        return PromptSet(
            batch=batch,
            image=first,
            other_text=self._prompt("image, other text", image, self._text(9)),
            other_image=self._prompt("other image", other, text),
        )

    def _text(self, count: int) -> list[int]:
        tokens: list[int] = self._random.integers(0, ORDINARY, count).tolist()
        return tokens

    def _image(self, height: int, width: int) -> Patches:
        pixels = self._random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        return with_digest(self._processor.process(Image(image=PILImage.fromarray(pixels), path="image")))

    def _video(self, count: int, height: int, width: int) -> Patches:
        frames = self._random.integers(0, 256, (count, height, width, 3), dtype=np.uint8)
        times = tuple(index / VIDEO_FPS for index in range(count))
        video = Video(frames=frames, path="video", times=times, sampled_fps=VIDEO_FPS)
        return with_digest(self._processor.process(video))

    def _prompt(self, name: str, *parts: list[int] | Patches) -> TinyPrompt:
        """Concatenate parts: token ids of text, images and videos."""
        ids = list[int]()
        items = list[Patches]()
        spans = list[PlaceholderSpan]()
        for part in parts:
            if isinstance(part, Patches):
                ids, added = self._append(ids, part, len(items))
                spans += added
                items.append(part)
            else:
                ids += part
        return TinyPrompt(
            name=name,
            token_ids=np.array(ids, np.int64),
            positions=self._layout.positions(len(ids), spans, items),
            items=tuple(items),
            spans=tuple(spans),
        )

    def _append(self, ids: Sequence[int], item: Patches, number: int) -> tuple[list[int], list[PlaceholderSpan]]:
        """Append an image or video; returns the tokens, and the spans of its placeholders."""
        expansion = self._layout.expand(item, _encode)
        longest = max(
            len(placeholder.tokens) for placeholder in self._layout.placeholders if placeholder.kind == item.kind
        )
        # A placeholder of more than one token includes those around the visual tokens.
        before, after = ((VISION_START,), (VISION_END,)) if longest == 1 else ((), ())
        begin = [*ids, *before, *_encode(expansion.leading_text)]
        spans, row = [], 0
        for index, length in expansion.spans:
            spans.append(PlaceholderSpan(start=len(begin) + index, length=length, item=number, row=row))
            row += length
        return [*begin, *expansion.token_ids.tolist(), *after], spans


def _encode(text: str) -> list[int]:
    """Tokenize the timestamps of a video."""
    return list(map(ord, text))
