"""The stages of a request before the decoder: documents, media, prompt, vision encoder."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from ..decoders import VisualSpan
from ..media.documents import Document
from ..media.loader import MediaLoader
from ..media.types import NO_TOKENS, Embeddings, TokenCount
from ..media_workers import MediaExecutor, TokenBudget
from ..models.coordinates import ImageCoordinates
from ..models.interface import ImageProcessor, Patches, VisualTokens
from ..preprocessing.preview import Preview, preview_media
from ..preprocessing.prompt import Prompt, PromptBuilder
from ..protocol import ChatRequest, DocumentPart, MediaPart
from ..protocol.client import current_client
from ..vision import VisionService
from ..vision.media_uuids import MediaUuidCache
from .documents import DocumentExpander
from .loras import ActiveLora
from .observers import RequestObserver
from .validation import find_coordinates, require_media_data

if TYPE_CHECKING:
    from ..models.spec import ModelSpec

RequestT = TypeVar("RequestT", bound=ChatRequest)


Item: TypeAlias = Patches | Embeddings | VisualTokens


@dataclass(frozen=True, slots=True, eq=False)
class LoadedMedia:
    """What the first of several requests has loaded, which the others do not load again.

    Attributes:
        media: its images and videos.
        documents: its documents.
    """

    media: dict[MediaPart, Item] = field(default_factory=dict)
    documents: dict[DocumentPart, Document] = field(default_factory=dict)


class Inputs(NamedTuple):
    """What the model gets for a request, whose documents were expanded."""

    request: ChatRequest
    items: Sequence[Item]
    coordinates: ImageCoordinates | None
    prompt: Prompt


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class InputPipeline:
    """The components that turn a request into what the decoder gets.

    Attributes:
        observer: is notified of stages and built prompts.
        video_pruning_rate: of videos for which the request sets no rate.
    """

    spec: ModelSpec
    media: MediaLoader
    media_executor: MediaExecutor
    documents: DocumentExpander
    processor: ImageProcessor
    prompts: PromptBuilder
    vision: VisionService
    media_uuids: MediaUuidCache
    observer: RequestObserver
    video_pruning_rate: float

    async def load(self, request: ChatRequest, lora: ActiveLora | None, loaded: LoadedMedia | None = None) -> Inputs:
        """Load the media of a request, and build its prompt.

        Args:
            request: the request.
            lora: its adapter.
            loaded: media that need not be loaded again; if it is empty, those of this request are added.
        """
        loaded = loaded or LoadedMedia()
        request = await self.documents.expand(request, loaded.documents)
        items = await self._load_media(request, lora, loaded.media)
        coordinates = find_coordinates(request, self.spec, items, self.processor)
        with self.observer.stage("prompt"):
            prompt = await asyncio.to_thread(self.prompts.build, request, items, coordinates)
        return Inputs(request, items, coordinates, prompt)

    async def encode(
        self, inputs: Inputs, request: ChatRequest, lora: ActiveLora | None
    ) -> tuple[Inputs, tuple[VisualSpan, ...]]:
        """Encode the images and videos of a prompt, or find them in a cache.

        Returns:
            the inputs, without pixels, whose prompt has the visual tokens that are kept, and these.
        """
        self.observer.prompt_built(len(inputs.prompt))
        with self.observer.stage("vision"):
            vision = lora.vision if lora else None
            visual = await self.vision.embed(
                inputs.items, cache_salt=request.cache_salt or "", lora=vision, progress=self.observer.units_encoded
            )
        inputs = inputs._replace(items=visual)  # the pixels are not needed any more
        if any(item.kept_rows is not None for item in visual):
            prompt = await asyncio.to_thread(self.prompts.build, inputs.request, visual, inputs.coordinates)
            inputs = inputs._replace(prompt=prompt)
        return inputs, place_visual_tokens(inputs.prompt, dict(enumerate(visual)))

    async def preview(self, request: ChatRequest) -> Preview:
        """Return what the model would see, without running the vision encoder or the decoder; nothing is cached."""
        request = await self.documents.expand(request, {})
        parts = await asyncio.to_thread(self._media_parts, request)
        require_media_data(parts)
        process = functools.partial(self.media_executor.process, budget=self._token_budget())
        items = await self.media.load(parts, process)
        coordinates = find_coordinates(request, self.spec, items, self.processor)
        prompt = await asyncio.to_thread(self.prompts.build, request, items, coordinates)
        previews = [
            await asyncio.to_thread(preview_media, item, self.processor, self.spec.coordinates) for item in items
        ]
        return Preview(items=tuple(previews), prompt_tokens=len(prompt), max_model_len=self.prompts.max_model_len)

    async def close(self) -> None:
        """Release all resources."""
        await self.vision.close()
        await self.media.close()
        await self.media_executor.close()

    async def _load_media(
        self, request: ChatRequest, lora: ActiveLora | None, kept: dict[MediaPart, Item]
    ) -> list[Item]:
        with self.observer.stage("media"):
            parts = await asyncio.to_thread(self._media_parts, request)  # may have to split megabytes of video frames
            self.media.check(parts)
            vision = lora.vision if lora else None
            found = await self.media_uuids.get(parts, cache_salt=request.cache_salt or "", lora=vision)
            # Parts are equal if only their contents differ.
            cached: list[Item | None] = [
                item if part.content is not None else kept.get(part, item)
                for part, item in zip(parts, found, strict=True)
            ]
            budget = self._token_budget(sum((item.token_count for item in cached if item), NO_TOKENS))
            given = [part for part, item in zip(parts, cached, strict=True) if item is None]
            new = await self.media.load(given, functools.partial(self.media_executor.process, budget=budget))
            self.media_uuids.bind(given, new, cache_salt=request.cache_salt or "")
            remaining = iter(new)
            items = [next(remaining) if item is None else item for item in cached]
            if not kept:
                kept.update(zip(parts, items, strict=True))
            return items

    def _media_parts(self, request: ChatRequest) -> list[MediaPart]:
        rate = self.video_pruning_rate
        return [
            replace(part, pruning_rate=rate) if part.kind == "video" and part.pruning_rate is None else part
            for part in request.media()
        ]

    def _token_budget(self, tokens: TokenCount = NO_TOKENS) -> TokenBudget:
        return TokenBudget(self.prompts.check_media, self.prompts.max_media_tokens, tokens)


def place_visual_tokens(prompt: Prompt, visual: Mapping[int, VisualTokens]) -> tuple[VisualSpan, ...]:
    """Return the visual tokens of a prompt where it has their placeholders, by the index of the image or video."""
    return tuple(
        VisualSpan(start=span.start, tokens=visual[span.item], row=span.row, length=span.length)
        for span in prompt.spans
    )


def in_client_namespace(request: RequestT) -> RequestT:
    """Return the request with the effective cache salt of its client, which all caches of media and prefixes use."""
    cache_salt = current_client.get().effective_cache_salt(request.cache_salt)
    return request if cache_salt == request.cache_salt else request.model_copy(update={"cache_salt": cache_salt})
