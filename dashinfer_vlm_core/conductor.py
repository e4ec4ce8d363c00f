"""The conductor: one line per stage of a request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .decoder import Decoder, DecodeRequest, Token, VisualSpan
from .errors import DashInferVLMError, EngineError, InvalidParameter, ModelNotFound, QueueFull, UnsupportedParameter
from .ids import MediaIds
from .media import Embeddings, Media, MediaLoader
from .patches import Embedded, Patcher, Patches, embedded
from .prompt import Prompt, PromptBuilder
from .reply import PromptCounts, Reply
from .sampling import Sampling
from .schema import DEFAULT_MAX_TOKENS, DEFAULT_MODEL, ChatRequest
from .vision import Item, VisionService, VisualTokens

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    from .model import ModelSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Generation:
    """One answer, with the tokens that it was read from and written in.

    Attributes:
        completion: the answer.
        prompt_token_ids: of the prompt; pictures and videos stand there as placeholders.
        token_ids: of the answer, the one that ends it included.
    """

    completion: ChatCompletion
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


class Places:
    """As many requests as are served or wait at one time; used on one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """Hold a place.

        Raises:
            QueueFull: none is left.
        """
        if self._taken >= self._limit:
            raise QueueFull(f"{self._taken} requests are served or wait already: try again in a moment.")
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Conductor:
    """The rooms of a running engine, in the order a request walks through them.

    Attributes:
        name: the model's name in answers.
        aliases: names that requests may use for it besides.
        places: bounds the requests that are anywhere between here and their answer.
    """

    name: str
    aliases: frozenset[str]
    places: Places
    spec: ModelSpec
    media: MediaLoader
    patcher: Patcher
    prompts: PromptBuilder
    vision: VisionService
    ids: MediaIds
    decoder: Decoder

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        return (await self.generate(request)).completion

    async def generate(self, request: ChatRequest) -> Generation:
        with _faults(), self.places.take():
            reply, decode = await self._prepare(request)
            ids = []
            async with contextlib.aclosing(self._tokens(reply, decode)) as tokens:
                async for token in tokens:
                    reply.feed(token)
                    ids.append(token.id)
            return Generation(
                completion=reply.completion(), prompt_token_ids=tuple(decode.token_ids.tolist()), token_ids=tuple(ids)
            )

    async def stream(self, request: ChatRequest) -> AsyncGenerator[ChatCompletionChunk, None]:
        with _faults(), self.places.take():
            reply, decode = await self._prepare(request)
            opening = [reply.opening()]  # goes out with the first token: what fails before is an error, not a stream
            async with contextlib.aclosing(self._tokens(reply, decode)) as tokens:
                async for token in tokens:
                    for chunk in (*opening, *reply.feed(token)):
                        yield chunk
                    opening.clear()
            for chunk in reply.closing():
                yield chunk

    async def close(self) -> None:
        await self.decoder.close()
        await self.vision.close()
        await self.media.close()

    async def _prepare(self, request: ChatRequest) -> tuple[Reply, DecodeRequest]:
        sampling = self._admit(request)
        items = await self._items(request)
        prompt = await asyncio.to_thread(self.prompts.build, request, items)
        visual = await self.vision.embed(items, salt=request.cache_salt or "")
        reply = self._reply(request, prompt)
        return reply, self._decode_request(reply.id, prompt, visual, sampling)

    async def _items(self, request: ChatRequest) -> list[Item]:
        """The pictures and videos: those that come along are loaded, the others are recalled by their names."""
        parts = await asyncio.to_thread(request.media)  # which may cut megabytes of frames apart
        salt, sources = request.cache_salt or "", dict[str, bytes]()
        self.media.check(parts)
        recalled = self.ids.recall(parts, salt=salt)
        cut = self._cutter(sources, seen=[item.tokens for item in recalled.values()])
        loaded = iter(await self.media.load([part for part in parts if part.given], then=cut))
        items = [recalled.get(part.part) or next(loaded) for part in parts]
        self.ids.bind(parts, items, sources, salt=salt)
        return items

    async def _tokens(self, reply: Reply, request: DecodeRequest) -> AsyncGenerator[Token, None]:
        async with contextlib.aclosing(self.decoder.decode(request)) as tokens:
            async for token in tokens:
                yield token
                if reply.finished:
                    return

    def _admit(self, request: ChatRequest) -> Sampling:
        """Refuse what this model and this decoder cannot do, before any work is done."""
        if request.model not in {self.name, DEFAULT_MODEL, *self.aliases}:
            raise ModelNotFound(
                f"The model {request.model!r} is not served here: ask for {self.name!r}.", param="model"
            )
        if self.decoder.blind and (media := request.media()):
            raise UnsupportedParameter(self.decoder.blind, param=media[0].part)
        sampling = request.sampling()
        for name in sorted(sampling.asked() - self.decoder.honours):
            raise UnsupportedParameter(
                f"The decoder {self.decoder.name!r} cannot honour {name}: leave it out, or start the engine with"
                " another decoder.",
                param=name,
            )
        for name, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
            if unknown := [index for index in ids if index >= self.spec.vocab_size]:
                raise InvalidParameter(
                    f"{name} names the token {unknown[0]}, but the model's ids end at {self.spec.vocab_size - 1}.",
                    param=name,
                )
        if sampling.min_tokens and len({*sampling.stop_token_ids, *self.spec.tokens.stop}) >= self.spec.vocab_size:
            raise InvalidParameter(
                "min_tokens bans stop_token_ids, which leave no other token.", param="stop_token_ids"
            )
        return sampling

    def _cutter(self, sources: dict[str, bytes], seen: list[int]) -> Callable[[Media], Patches | Embedded]:
        """What becomes of each picture and video of one request; it is called in several threads.

        What the context could never hold is refused before it is resized.

        Args:
            sources: gets the digest of what each was decoded from.
            seen: visual tokens of those that need no cutting; gets those of the others.
        """

        def cut(media: Media) -> Patches | Embedded:
            sources[media.part] = media.source
            seen.append(len(media.rows) if isinstance(media, Embeddings) else self.patcher.tokens(media))
            self.prompts.check_media(sum(seen))
            return embedded(media, self.spec) if isinstance(media, Embeddings) else self.patcher.cut(media)

        return cut

    def _reply(self, request: ChatRequest, prompt: Prompt) -> Reply:
        counts = PromptCounts(
            prompt_tokens=len(prompt), image_tokens=prompt.image_tokens, video_tokens=prompt.video_tokens
        )
        return Reply(
            tokenizer=self.prompts.tokenizer,
            request=request,
            id=f"chatcmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self.name,
            counts=counts,
        )

    def _decode_request(
        self, reply_id: str, prompt: Prompt, visual: Sequence[VisualTokens], sampling: Sampling
    ) -> DecodeRequest:
        max_tokens = min(sampling.max_tokens or DEFAULT_MAX_TOKENS, self.prompts.max_model_len - len(prompt))
        if sampling.min_tokens > max_tokens:
            raise InvalidParameter(
                f"min_tokens is {sampling.min_tokens}, but the answer can have {max_tokens} tokens at most.",
                param="min_tokens",
            )
        spans = sorted(zip(prompt.spans, visual, strict=True), key=lambda pair: pair[0].start)
        return DecodeRequest(
            id=reply_id,
            token_ids=prompt.token_ids,
            positions=prompt.positions,
            spans=tuple(VisualSpan(start=span.start, tokens=tokens) for span, tokens in spans),
            sampling=replace(sampling, max_tokens=max_tokens),
        )


@contextlib.contextmanager
def _faults() -> Iterator[None]:
    """Where a request ends: what no room foresaw is logged, and told to the caller without its inner details."""
    try:
        yield
    except DashInferVLMError:
        raise
    except Exception as error:
        logger.exception("a request failed")
        raise EngineError(
            "The engine failed on this request; its log says why. Other requests are not affected.",
            code="internal_error",
        ) from error
