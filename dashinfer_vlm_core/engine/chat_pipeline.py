"""The chat pipeline: the stages of a request in order, one line per stage."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from ..concurrency.streams import merge_streams
from ..decoders import GUIDED_DECODING, DecodeRequest, GrammarMatcher, Token, VisualSpan
from ..decoders.supervisor import Supervisor
from ..errors import InvalidParameter
from ..media import MediaLoader
from ..media_workers import MediaExecutor, TokenBudget
from ..models.coordinates import ImageCoordinates
from ..models.interface import ImageProcessor, VisualTokens
from ..preprocessing.preview import MediaPreview, Preview, preview_media
from ..preprocessing.prompt import Prompt, PromptBuilder
from ..protocol import DEFAULT_MAX_TOKENS, ChatRequest, MediaPart
from ..protocol.client import current_client
from ..protocol.sampling import Sampling
from ..response.response_builder import PromptCounts, ResponseBuilder
from ..structured_output.request_grammars import RequestGrammars
from ..vision import CachedMedia, Item, Processed, VisionService
from ..vision.media_uuids import MediaUuidCache
from .coordinates import ImageSizes, find_coordinates
from .generation import Generation
from .internal_errors import hide_internal_errors
from .limiter import ConcurrencyLimiter
from .loras import ActiveLora, LoraManager
from .observers import RequestObserver, RequestTimer
from .validation import check_request, reject_structured_output, require_media_data

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    from ..models.lora import LoraWeights
    from ..models.spec import ModelSpec


class _LoadedMedia(NamedTuple):
    """An image or video of a request, and its width and height before resizing in pixels; None for embeddings."""

    item: Item
    source_size: tuple[int, int] | None

    @classmethod
    def from_cache(cls, item: CachedMedia) -> _LoadedMedia:
        return cls(item, item.source_size)

    @classmethod
    def from_request(cls, processed: Processed) -> _LoadedMedia:
        return cls(processed.item, processed.source_size)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChatPipeline:
    """The components of a running engine. Its methods run the stages of a request.

    Attributes:
        name: the model's name in responses.
        limiter: bounds the completions, from arrival to the end of the response.
        loras: the LoRA adapters that requests can use.
        observer: is notified of stages, tokens and completed requests.
    """

    name: str
    limiter: ConcurrencyLimiter
    spec: ModelSpec
    media: MediaLoader
    media_executor: MediaExecutor
    processor: ImageProcessor
    prompts: PromptBuilder
    vision: VisionService
    media_uuids: MediaUuidCache
    grammars: RequestGrammars
    decoder: Supervisor
    loras: LoraManager
    observer: RequestObserver

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        return (await self.generate(request)).completion

    async def generate(self, request: ChatRequest) -> Generation:
        """Serve a request; return the complete response with its tokens."""
        async with self._admit(request, n=request.n) as lora:
            timer = RequestTimer(self.observer, n=request.n)
            builders, decode_requests = await self._prepare(request, lora)
            timer.queued()
            token_ids: list[list[int]] = [[] for _ in builders]
            async with contextlib.aclosing(self._decode(builders, decode_requests, timer)) as tokens:
                async for index, token in tokens:
                    builders[index].add_token(token)
                    token_ids[index].append(token.id)
            completion = builders[0].completion(builders[1:])
            timer.completed(builders[0].usage(builders[1:]))
            return Generation(
                completion=completion,
                prompt_token_ids=tuple(decode_requests[0].token_ids.tolist()),
                token_ids=tuple(map(tuple, token_ids)),
                stop_reasons=tuple(
                    self._stop_reason(request, builder, ids[-1])
                    for builder, ids in zip(builders, token_ids, strict=True)
                ),
                stats=timer.stats(),
            )

    def _stop_reason(self, request: ChatRequest, builder: ResponseBuilder, last_token: int) -> str | int | None:
        if builder.stop_string is not None:
            return builder.stop_string
        is_end = last_token in self.spec.tokens.stop and not request.ignore_eos
        return last_token if last_token in request.stop_token_ids and not is_end else None

    async def stream(self, request: ChatRequest) -> AsyncGenerator[ChatCompletionChunk, None]:
        """Serve a request; yield the response as chunks."""
        async with self._admit(request, n=request.n) as lora:
            timer = RequestTimer(self.observer, n=request.n)
            builders, decode_requests = await self._prepare(request, lora)
            async with contextlib.aclosing(self._decode(builders, decode_requests, timer)) as tokens:
                async for index, token in tokens:
                    builder = builders[index]
                    # The first chunk is sent with the first token, so that an earlier failure is an error response and
                    # not a broken stream.
                    for chunk in builder.add_token(token):
                        yield chunk
                    for chunk in builder.final_chunks() if builder.finished else ():
                        yield chunk
            for builder in builders:
                if not builder.finished:
                    builder.final_chunks()  # raises: the decoder ended without a finish reason
            timer.completed(builders[0].usage(builders[1:]))
            for chunk in builders[0].usage_chunks(builders[1:]):
                yield chunk

    async def preview(self, request: ChatRequest) -> Preview:
        """Return what the model would see, without running the vision encoder or the decoder; nothing is cached."""
        async with self._admit(request):
            check_request(request, self.spec, self.decoder, self.prompts)
            parts = await asyncio.to_thread(request.media)
            require_media_data(parts)
            budget = self._token_budget()

            async def process_and_preview(part: MediaPart, data: Sequence[bytes]) -> MediaPreview:
                item, _, source_size = await self.media_executor.process(part, data, budget)
                return await asyncio.to_thread(preview_media, item, self.processor, source_size, self.spec.coordinates)

            items = await self.media.load(parts, process_and_preview)
            coordinates = find_coordinates(request, self.spec, ((item.source_size, item.size) for item in items))
            prompt = await asyncio.to_thread(self.prompts.build, request, items, coordinates)
            return Preview(items=items, prompt_tokens=len(prompt), max_model_len=self.prompts.max_model_len)

    async def tokenize(self, request: ChatRequest) -> list[int]:
        """Return the prompt's token ids, with placeholders for images and videos, which are not encoded."""
        async with self._admit(request) as lora:
            check_request(request, self.spec, self.decoder, self.prompts)
            request = _in_client_namespace(request)
            loaded = await self._load_media(request, lora)
            coordinates = find_coordinates(request, self.spec, self._sizes(loaded))
            prompt = await self._build_prompt(request, [media.item for media in loaded], coordinates)
            ids: list[int] = prompt.token_ids.tolist()
            return ids

    async def close(self) -> None:
        """Release all resources.

        Raises:
            DecoderFailed: a step of the decoder does not finish in time; everything else was released.
        """
        try:
            await self.decoder.close()
        finally:
            self.grammars.close()
            await self.vision.close()
            await self.media.close()
            await self.media_executor.close()

    @contextlib.asynccontextmanager
    async def _admit(self, request: ChatRequest, *, n: int = 1) -> AsyncIterator[ActiveLora | None]:
        """Hold `n` slots and the request's adapter, and hide internal errors."""
        with hide_internal_errors(), self.limiter.slots(n):
            async with self.loras.use(request) as lora:
                yield lora

    async def _prepare(
        self, request: ChatRequest, lora: ActiveLora | None
    ) -> tuple[list[ResponseBuilder], list[DecodeRequest]]:
        """Run the stages before the decoder; return a response builder and a decode request per choice."""
        sampling = check_request(request, self.spec, self.decoder, self.prompts)
        request = _in_client_namespace(request)
        grammar = await self._compile_grammar(request)
        loaded = await self._load_media(request, lora)
        items = [media.item for media in loaded]
        coordinates = find_coordinates(request, self.spec, self._sizes(loaded))
        prompt = await self._build_prompt(request, items, coordinates)
        self.observer.prompt_built(len(prompt))
        visual = await self._encode_media(request, items, lora)
        builders = self._response_builders(request, prompt, coordinates, lora, guided=grammar is not None)
        weights = lora.weights if lora else None
        response_id = builders[0].id
        return builders, self._decode_requests(
            request, prompt, visual, sampling, grammar, lora=weights, response_id=response_id
        )

    def _sizes(self, loaded: Sequence[_LoadedMedia]) -> Iterator[ImageSizes]:
        for item, source_size in loaded:
            shape = self.processor.shape(item.grid)
            yield source_size, (shape.width, shape.height)

    async def _compile_grammar(self, request: ChatRequest) -> GrammarMatcher | None:
        """Compile the grammar that the response has to follow; None if it is unconstrained."""
        with self.observer.stage("grammar"):
            if GUIDED_DECODING not in self.decoder.supported_params:
                reject_structured_output(request, self.decoder.name)
                return None
            return await self.grammars.compile(request, self.prompts.opens_reasoning)

    async def _load_media(self, request: ChatRequest, lora: ActiveLora | None) -> list[_LoadedMedia]:
        """Load and process the request's images and videos; look up those referenced by `uuid` alone."""
        with self.observer.stage("media"):
            parts = await asyncio.to_thread(request.media)  # may have to split megabytes of video frames
            self.media.check(parts)
            vision = lora.vision if lora else None
            cached = self.media_uuids.get(parts, cache_salt=request.cache_salt or "", lora=vision)
            budget = self._token_budget(sum(item.tokens for item in cached.values()))
            given = [part for part in parts if part.has_source]
            processed = await self.media.load(given, functools.partial(self.media_executor.process, budget=budget))
            self.media_uuids.bind(given, processed, cache_salt=request.cache_salt or "")
            loaded = iter(processed)
            return [
                _LoadedMedia.from_cache(cached[part.path])
                if part.path in cached
                else _LoadedMedia.from_request(next(loaded))
                for part in parts
            ]

    def _token_budget(self, tokens: int = 0) -> TokenBudget:
        """Return a budget of visual tokens for one request, of which `tokens` are used."""
        return TokenBudget(self.prompts.check_media, self.prompts.max_model_len - 1, tokens)

    async def _build_prompt(
        self, request: ChatRequest, items: Sequence[Item], coordinates: ImageCoordinates | None
    ) -> Prompt:
        with self.observer.stage("prompt"):
            return await asyncio.to_thread(self.prompts.build, request, items, coordinates)

    async def _encode_media(
        self, request: ChatRequest, items: Sequence[Item], lora: ActiveLora | None
    ) -> Sequence[VisualTokens]:
        with self.observer.stage("vision"):
            vision = lora.vision if lora else None
            return await self.vision.embed(items, cache_salt=request.cache_salt or "", lora=vision)

    async def _decode(
        self, builders: Sequence[ResponseBuilder], requests: Sequence[DecodeRequest], timer: RequestTimer
    ) -> AsyncGenerator[tuple[int, Token], None]:
        """Yield the tokens of all choices as they arrive, each with the index of its choice.

        The decoder's generator of a choice is closed as soon as its response builder is finished.
        """
        streams = [self.decoder.decode(request) for request in requests]
        with self.observer.stage("decode"):
            async with contextlib.aclosing(merge_streams(streams)) as tokens:
                async for index, token in tokens:
                    timer.token(index)
                    yield index, token
                    if builders[index].finished:
                        await streams[index].aclose()

    def _response_builders(
        self,
        request: ChatRequest,
        prompt: Prompt,
        coordinates: ImageCoordinates | None,
        lora: ActiveLora | None,
        *,
        guided: bool,
    ) -> list[ResponseBuilder]:
        counts = PromptCounts(
            prompt_tokens=len(prompt), image_tokens=prompt.image_tokens, video_tokens=prompt.video_tokens
        )
        response_id, created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        return [
            ResponseBuilder(
                tokenizer=self.prompts.tokenizer,
                request=request,
                id=response_id,
                created=created,
                model=lora.weights.name if lora else self.name,
                counts=counts,
                index=index,
                guided=guided,
                conversation=self.spec.conversation,
                supports_reasoning=self.prompts.supports_reasoning,
                opens_reasoning=prompt.opens_reasoning,
                coordinates=coordinates,
            )
            for index in range(request.n)
        ]

    def _decode_requests(
        self,
        request: ChatRequest,
        prompt: Prompt,
        visual: Sequence[VisualTokens],
        sampling: Sampling,
        grammar: GrammarMatcher | None,
        *,
        lora: LoraWeights | None,
        response_id: str,
    ) -> list[DecodeRequest]:
        max_tokens = min(sampling.max_tokens or DEFAULT_MAX_TOKENS, self.prompts.max_model_len - len(prompt))
        if sampling.min_tokens > max_tokens:
            raise InvalidParameter(
                f"`min_tokens` is {sampling.min_tokens}, but the completion can have at most {max_tokens} tokens.",
                param="min_tokens",
            )
        sampling = replace(sampling, max_tokens=max_tokens)
        first = DecodeRequest(
            id=response_id,
            token_ids=prompt.token_ids,
            positions=prompt.positions,
            spans=tuple(
                VisualSpan(start=span.start, tokens=visual[span.item], row=span.row, length=span.length)
                for span in prompt.spans
            ),
            sampling=sampling,
            grammar=grammar,
            cache_salt=request.cache_salt or "",
            lora=lora,
        )
        others = range(1, request.n)
        return [first, *(replace(first, id=f"{first.id}-{i}", sampling=sampling.seeded(i)) for i in others)]


def _in_client_namespace(request: ChatRequest) -> ChatRequest:
    """Return the request with the effective cache salt of its client, which all caches of media and prefixes use."""
    cache_salt = current_client.get().effective_cache_salt(request.cache_salt)
    return request if cache_salt == request.cache_salt else request.model_copy(update={"cache_salt": cache_salt})
