"""The conductor: one line per stage of a request."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from ..decoders import GUIDED_DECODING, CompiledGrammar, DecodeRequest, Token, VisualSpan
from ..decoders.supervisor import Supervisor
from ..errors import DashInferVLMError, EngineError, InvalidParameter, ModelNotFound, QueueFull, UnsupportedParameter
from ..media import Embeddings, Media, MediaLoader
from ..models.interface import ImageProcessor, VisualTokens
from ..models.patches import embedded
from ..preprocessing.preview import MediaPreview, Preview, preview_media
from ..preprocessing.prompt import Prompt, PromptBuilder
from ..protocol import DEFAULT_MAX_TOKENS, DEFAULT_MODEL, ChatRequest, MediaPart
from ..protocol.sampling import Sampling
from ..response.response_builder import PromptCounts, ResponseBuilder
from ..structured_output.grammar_compiler import GrammarCompiler
from ..structured_output.output_grammar import grammar_for_request
from ..vision import Item, Processed, VisionService
from ..vision.media_uuids import MediaUuidCache
from .observers import RequestObserver, RequestTimer

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    from ..models.spec import ModelSpec

logger: logging.Logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Generation:
    """The answers of one request, with the tokens that they were read from and written in.

    Attributes:
        completion: the answers.
        prompt_token_ids: of the prompt; pictures and videos stand there as placeholders.
        token_ids: of each answer, the one that ends it included.
    """

    completion: ChatCompletion
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[tuple[int, ...], ...]


class _TokenBudget:
    """Counts the visual tokens of one request while its media are processed, in several threads.

    Args:
        check: is given the sum, and refuses it where it is too large.
        tokens: that need no processing.
    """

    def __init__(self, check: Callable[[int], None], tokens: int = 0) -> None:
        self._check = check
        self._tokens = tokens
        self._lock = threading.Lock()

    def add(self, tokens: int) -> None:
        with self._lock:
            self._tokens += tokens
            self._check(self._tokens)


class ConcurrencyLimiter:
    """As many answers as are decoded or wait at one time; used on one event loop.

    Attributes:
        limit: most of them.
        taken: those that there are now.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_use: int = 0

    @contextlib.contextmanager
    def slots(self, answers: int = 1) -> Iterator[None]:
        """Hold a place for each answer of a request.

        Raises:
            InvalidParameter: there were never so many.
            QueueFull: not so many are left.
        """
        if answers > self.limit:
            raise InvalidParameter(f"`n` can be {self.limit} at most: ask for fewer answers.", param="n")
        if self.in_use + answers > self.limit:
            raise QueueFull(f"{self.in_use} requests are served or wait already: try again in a moment.")
        self.in_use += answers
        try:
            yield
        finally:
            self.in_use -= answers


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChatPipeline:
    """The rooms of a running engine, in the order a request walks through them.

    Attributes:
        name: the model's name in answers.
        aliases: names that requests may use for it besides.
        places: bounds the requests that are anywhere between here and their answer.
        watcher: is told what happens to requests.
    """

    name: str
    aliases: frozenset[str]
    limiter: ConcurrencyLimiter
    spec: ModelSpec
    media: MediaLoader
    processor: ImageProcessor
    prompts: PromptBuilder
    vision: VisionService
    media_uuids: MediaUuidCache
    grammars: GrammarCompiler
    decoder: Supervisor
    observer: RequestObserver

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        return (await self.generate(request)).completion

    async def generate(self, request: ChatRequest) -> Generation:
        with _faults(), self.limiter.slots(request.n):
            timer = RequestTimer(self.observer, answers=request.n)
            responses, decodes = await self._prepare(request)
            ids: list[list[int]] = [[] for _ in responses]
            async with contextlib.aclosing(self._tokens(responses, decodes, timer)) as tokens:
                async for index, token in tokens:
                    responses[index].add_token(token)
                    ids[index].append(token.id)
            completion = responses[0].completion(responses[1:])
            timer.answered(responses[0].usage(responses[1:]))
            return Generation(
                completion=completion,
                prompt_token_ids=tuple(decodes[0].token_ids.tolist()),
                token_ids=tuple(map(tuple, ids)),
            )

    async def stream(self, request: ChatRequest) -> AsyncGenerator[ChatCompletionChunk, None]:
        with _faults(), self.limiter.slots(request.n):
            timer = RequestTimer(self.observer, answers=request.n)
            responses, decodes = await self._prepare(request)
            # They go out with the first token: what fails before is an error, not a stream.
            opening = [response.first_chunk() for response in responses]
            async with contextlib.aclosing(self._tokens(responses, decodes, timer)) as tokens:
                async for index, token in tokens:
                    response = responses[index]
                    chunks = [
                        *opening,
                        *response.add_token(token),
                        *(response.final_chunks() if response.finished else ()),
                    ]
                    opening.clear()
                    for chunk in chunks:
                        yield chunk
            for response in responses:
                if not response.finished:
                    response.final_chunks()  # says what is wrong
            timer.answered(responses[0].usage(responses[1:]))
            for chunk in responses[0].usage_chunks(responses[1:]):
                yield chunk

    async def preview(self, request: ChatRequest) -> Preview:
        """What the model would see; neither the tower nor the decoder runs, and nothing is remembered."""
        with _faults(), self.limiter.slots():
            self._admit(request)
            parts = await asyncio.to_thread(request.media)
            _check_given(parts)
            budget = _TokenBudget(self.prompts.check_media)

            def show(media: Media) -> MediaPreview:
                return preview_media(media, self._process(budget, media).item, self.processor)

            items = await self.media.load(parts, then=show)
            prompt = await asyncio.to_thread(self.prompts.build, request, items)
            return Preview(items=items, prompt_tokens=len(prompt), max_model_len=self.prompts.max_model_len)

    async def tokenize(self, request: ChatRequest) -> list[int]:
        """The prompt of a request, each picture and video as its placeholders; none is encoded."""
        with _faults(), self.limiter.slots():
            self._admit(request)
            _, prompt = await self._read(request)
            ids: list[int] = prompt.token_ids.tolist()
            return ids

    async def close(self) -> None:
        """Free everything. Raises DecoderFailed, when all else is freed, if a step of the decoder does not end soon."""
        try:
            await self.decoder.close()
        finally:
            await self.vision.close()
            await self.media.close()

    async def _prepare(self, request: ChatRequest) -> tuple[list[ResponseBuilder], list[DecodeRequest]]:
        """The answers of a request, not begun, and how to decode each; all have one prompt."""
        sampling = self._admit(request)
        with self.observer.stage("grammar"):
            grammar = await self._compiled_grammar(request)
        items, prompt = await self._read(request)
        with self.observer.stage("vision"):
            visual = await self.vision.embed(items, cache_salt=request.cache_salt or "")
        responses = self._responses(request, prompt, guided=grammar is not None)
        return responses, self._decode_requests(
            responses, prompt, visual, sampling, grammar, cache_salt=request.cache_salt or ""
        )

    async def _read(self, request: ChatRequest) -> tuple[list[Item], Prompt]:
        """The pictures and videos of a request, cut, and its prompt."""
        with self.observer.stage("media"):
            items = await self._items(request)
        with self.observer.stage("prompt"):
            return items, await asyncio.to_thread(self.prompts.build, request, items)

    async def _compiled_grammar(self, request: ChatRequest) -> CompiledGrammar | None:
        """The compiled grammar of an answer that has to follow one."""
        if GUIDED_DECODING not in self.decoder.supported_params:
            self._refuse_structured_output(request)
            return None
        output_grammar = await asyncio.to_thread(grammar_for_request, request, self.spec.conversation)
        if output_grammar is None:
            return None
        if request.ignore_eos:
            raise InvalidParameter(
                "`ignore_eos` goes on after the end that the format sets: leave one of them out.", param="ignore_eos"
            )
        return await self.grammars.compile_async(output_grammar.rules, output_grammar.start, param=output_grammar.param)

    def _refuse_structured_output(self, request: ChatRequest) -> None:
        """Refuse what only a grammar can ensure; tools may still be offered, and calls are found in the answer."""
        wanted = request.response_format
        strict = [f"tools[{i}].function.strict" for i, tool in enumerate(request.tools) if tool.function.strict]
        forced = ["tool_choice"] if request.must_call else []
        formats = ["response_format"] if wanted and wanted.type != "text" else []
        for param in [*formats, *forced, *(strict if request.callable_tools else ())]:
            raise UnsupportedParameter(
                f"The decoder {self.decoder.name!r} cannot honour {param}: leave it out and ask for it in the prompt,"
                " or start the engine with another decoder.",
                param=param,
            )

    async def _items(self, request: ChatRequest) -> list[Item]:
        """The pictures and videos: those that come along are loaded, the others are recalled by their names."""
        parts = await asyncio.to_thread(request.media)  # which may cut megabytes of frames apart
        self.media.check(parts)
        cached = self.media_uuids.get(parts, cache_salt=request.cache_salt or "")
        budget = _TokenBudget(self.prompts.check_media, sum(item.tokens for item in cached.values()))
        given = [part for part in parts if part.given]
        processed = await self.media.load(given, then=functools.partial(self._process, budget))
        self.media_uuids.bind(given, processed, cache_salt=request.cache_salt or "")
        loaded = iter(processed)
        return [cached.get(part.path) or next(loaded).item for part in parts]

    async def _tokens(
        self, responses: Sequence[ResponseBuilder], requests: Sequence[DecodeRequest], timer: RequestTimer
    ) -> AsyncGenerator[tuple[int, Token], None]:
        """The tokens of all answers as they come, each with the answer's index; none of an answer that is finished."""
        streams = [self.decoder.decode(request) for request in requests]
        with self.observer.stage("decode"):
            async with contextlib.aclosing(merge_streams(streams)) as tokens:
                async for index, token in tokens:
                    timer.token(index)
                    yield index, token
                    if responses[index].finished:
                        await streams[index].aclose()

    def _admit(self, request: ChatRequest) -> Sampling:
        """Refuse what this model and this decoder cannot do, before any work is done."""
        if request.model not in {self.name, DEFAULT_MODEL, *self.aliases}:
            raise ModelNotFound(
                f"The model {request.model!r} is not served here: ask for {self.name!r}.", param="model"
            )
        if self.decoder.unsupported_vision_reason and (media := request.media()):
            raise UnsupportedParameter(self.decoder.unsupported_vision_reason, param=media[0].path)
        sampling = request.sampling()
        for name in sorted(sampling.requested_params() - self.decoder.supported_params):
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

    def _process(self, budget: _TokenBudget, media: Media) -> Processed:
        """What becomes of a picture or video of a request; called in several threads.

        What the context could never hold is refused before it is resized.
        """
        if isinstance(media, Embeddings):
            budget.add(len(media.rows))
            return Processed(embedded(media, self.spec, self.processor), media.source)
        budget.add(self.processor.count_tokens(media))
        return Processed(self.processor.process(media), media.source)

    def _responses(self, request: ChatRequest, prompt: Prompt, *, guided: bool) -> list[ResponseBuilder]:
        counts = PromptCounts(
            prompt_tokens=len(prompt), image_tokens=prompt.image_tokens, video_tokens=prompt.video_tokens
        )
        name, created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        return [
            ResponseBuilder(
                tokenizer=self.prompts.tokenizer,
                request=request,
                id=name,
                created=created,
                model=self.name,
                counts=counts,
                index=index,
                guided=guided,
                conversation=self.spec.conversation,
            )
            for index in range(request.n)
        ]

    def _decode_requests(
        self,
        responses: Sequence[ResponseBuilder],
        prompt: Prompt,
        visual: Sequence[VisualTokens],
        sampling: Sampling,
        grammar: CompiledGrammar | None,
        *,
        cache_salt: str,
    ) -> list[DecodeRequest]:
        max_tokens = min(sampling.max_tokens or DEFAULT_MAX_TOKENS, self.prompts.max_model_len - len(prompt))
        if sampling.min_tokens > max_tokens:
            raise InvalidParameter(
                f"min_tokens is {sampling.min_tokens}, but the answer can have {max_tokens} tokens at most.",
                param="min_tokens",
            )
        sampling = replace(sampling, max_tokens=max_tokens)
        first = DecodeRequest(
            id=responses[0].id,
            token_ids=prompt.token_ids,
            positions=prompt.positions,
            spans=tuple(
                VisualSpan(start=span.start, tokens=visual[span.item], row=span.row, length=span.length)
                for span in prompt.spans
            ),
            sampling=sampling,
            grammar=grammar,
            cache_salt=cache_salt,
        )
        others = range(1, len(responses))
        return [first, *(replace(first, id=f"{first.id}-{i}", sampling=sampling.seeded(i)) for i in others)]


def _check_given(parts: Sequence[MediaPart]) -> None:
    """Of what comes by its name alone, only its visual tokens are left."""
    for part in parts:
        if not part.given:
            raise InvalidParameter(
                f"`{part.path}` is a name alone, which cannot be shown: send the {part.kind} along.", param=part.path
            )


async def merge_streams(streams: Sequence[AsyncGenerator[_T, None]]) -> AsyncGenerator[tuple[int, _T], None]:
    """What several generators yield, as it comes, each with its generator's index.

    A generator is asked for more when what it gave has been dealt with, never before. All are closed in the end.
    """
    if len(streams) == 1:  # without a task per item
        async with contextlib.aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    waiting: dict[asyncio.Future[_T | None], int] = {}
    try:
        for index, stream in enumerate(streams):
            waiting[asyncio.ensure_future(_next(stream))] = index
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                if (found := task.result()) is not None:
                    yield index, found
                    waiting[asyncio.ensure_future(_next(streams[index]))] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[_T, None]) -> _T | None:
    return await anext(stream, None)


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
