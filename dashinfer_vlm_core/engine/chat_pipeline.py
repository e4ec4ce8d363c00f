"""The chat pipeline: the stages of a request in order, one line per stage."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..concurrency.streams import merge_streams
from ..decoders import GUIDED_DECODING, DecodeRequest, GrammarMatcher, Token
from ..decoders.supervisor import Supervisor
from ..errors import InvalidParameter
from ..preprocessing.preview import Preview
from ..protocol import DEFAULT_MAX_TOKENS, ChatRequest
from ..protocol.sampling import Sampling
from ..response.response_builder import PromptCounts, ResponseBuilder
from ..structured_output.request_grammars import RequestGrammars
from .admission import ConcurrencyLimiter, hide_internal_errors
from .documents import PageRequest
from .history import HistoryPrefill, Turn
from .inputs import InputPipeline, Inputs, in_client_namespace
from .loras import ActiveLora, LoraManager
from .observers import RequestObserver, RequestStateStats, RequestTimer
from .validation import check_request, check_task, reject_structured_output

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    from ..models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Generation:
    """The response to one request, with its tokens.

    Attributes:
        completion: the response, with all its choices.
        prompt_token_ids: the prompt's token ids; images and videos are represented by placeholders.
        token_ids: the token ids of each choice, including the one that ends it.
        stop_reasons: the stop string or the token of `stop_token_ids` that ended each choice; None for other reasons.
        stats: when the request was served.
    """

    completion: ChatCompletion
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[tuple[int, ...], ...]
    stop_reasons: tuple[str | int | None, ...]
    stats: RequestStateStats


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChatPipeline:
    """The components of a running engine. Its methods run the stages of a request.

    Attributes:
        name: the model's name in responses.
        decoder_reason: why this decoder was selected.
        limiter: bounds the completions, from arrival to the end of the response.
        loras: the LoRA adapters that requests can use.
        history: computes the next turn's history while no request runs; None if nothing would keep it.
        observer: is notified of stages, tokens and completed requests.
    """

    name: str
    decoder_reason: str
    limiter: ConcurrencyLimiter
    spec: ModelSpec
    inputs: InputPipeline
    grammars: RequestGrammars
    decoder: Supervisor
    loras: LoraManager
    history: HistoryPrefill | None
    observer: RequestObserver

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        return (await self.generate(request)).completion

    async def generate(self, request: ChatRequest) -> Generation:
        """Serve a request; return the complete response with its tokens."""
        async with self._admit(request, n=request.n) as lora:
            timer = RequestTimer(self.observer, n=request.n)
            inputs, builders, decode_requests = await self._prepare(request, lora)
            timer.queued()
            token_ids: list[list[int]] = [[] for _ in builders]
            async with contextlib.aclosing(self._decode(builders, decode_requests, timer)) as tokens:
                async for index, token in tokens:
                    builders[index].add_token(token)
                    token_ids[index].append(token.id)
            completion = builders[0].completion(builders[1:])
            timer.completed(builders[0].usage(builders[1:]))
            self._prefill_history(inputs, decode_requests, token_ids, builders)
            return Generation(
                completion=completion,
                prompt_token_ids=tuple(decode_requests[0].token_ids.tolist()),
                token_ids=tuple(map(tuple, token_ids)),
                stop_reasons=tuple(
                    self._stop_reason(request, builder, ids[-1])
                    for builder, ids in zip(builders, token_ids, strict=True)
                ),
                stats=timer.stats,
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
            inputs, builders, decode_requests = await self._prepare(request, lora)
            token_ids: list[list[int]] = [[] for _ in builders]
            async with contextlib.aclosing(self._decode(builders, decode_requests, timer)) as tokens:
                async for index, token in tokens:
                    builder = builders[index]
                    token_ids[index].append(token.id)
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
            self._prefill_history(inputs, decode_requests, token_ids, builders)
            for chunk in builders[0].usage_chunks(builders[1:]):
                yield chunk

    async def split(self, request: ChatRequest, pages: str) -> list[PageRequest]:
        """Return a request for each selected page of a request's document; see `DocumentExpander.split`."""
        async with self._admit(request):
            check_task(self.spec.task, "generate", name=self.name)
            check_request(request, self.spec, self.decoder, self.inputs.prompts)
            return await self.inputs.documents.split(request, pages)

    async def preview(self, request: ChatRequest) -> Preview:
        """Return what the model would see, without running the vision encoder or the decoder; nothing is cached."""
        async with self._admit(request):
            check_request(request, self.spec, self.decoder, self.inputs.prompts)
            return await self.inputs.preview(request)

    async def tokenize(self, request: ChatRequest) -> list[int]:
        """Return the prompt's token ids, with placeholders for images and videos, which are not encoded."""
        async with self._admit(request) as lora:
            check_request(request, self.spec, self.decoder, self.inputs.prompts)
            inputs = await self.inputs.load(in_client_namespace(request), lora)
            ids: list[int] = inputs.prompt.token_ids.tolist()
            return ids

    async def close(self) -> None:
        """Release all resources.

        Raises:
            DecoderFailed: a step of the decoder does not finish in time; everything else was released.
        """
        try:
            if self.history:
                await self.history.close()
            await self.decoder.close()
        finally:
            self.grammars.close()
            await self.inputs.close()

    @contextlib.asynccontextmanager
    async def _admit(self, request: ChatRequest, *, n: int = 1) -> AsyncIterator[ActiveLora | None]:
        with hide_internal_errors(), self.limiter.slots(n):
            if self.history:
                self.history.stop()
            async with self.loras.use(request) as lora:
                yield lora

    async def _prepare(
        self, request: ChatRequest, lora: ActiveLora | None
    ) -> tuple[Inputs, list[ResponseBuilder], list[DecodeRequest]]:
        check_task(self.spec.task, "generate", name=self.name)
        sampling = check_request(request, self.spec, self.decoder, self.inputs.prompts)
        request = in_client_namespace(request)
        grammar = await self._compile_grammar(request)
        inputs = await self.inputs.load(request, lora)
        inputs, spans = await self.inputs.encode(inputs, request, lora)
        builders = self._response_builders(request, inputs, lora, guided=grammar is not None)
        first = DecodeRequest(
            id=builders[0].id,
            token_ids=inputs.prompt.token_ids,
            positions=inputs.prompt.positions,
            spans=spans,
            response_boundaries=inputs.prompt.response_boundaries,
            sampling=self._limited(request, sampling, len(inputs.prompt)),
            grammar=grammar,
            cache_salt=request.cache_salt or "",
            lora=lora.weights if lora else None,
        )
        others = (replace(first, id=f"{first.id}-{i}", sampling=first.sampling.seeded(i)) for i in range(1, request.n))
        return inputs, builders, [first, *others]

    def _prefill_history(
        self,
        inputs: Inputs,
        decoded: Sequence[DecodeRequest],
        token_ids: Sequence[Sequence[int]],
        builders: Sequence[ResponseBuilder],
    ) -> None:
        response = builders[0].final_text
        if self.history and response is not None and self.limiter.in_use == 1 and inputs.request.raw_prompt is None:
            self.history.start(Turn(inputs=inputs, decoded=decoded[0], output_ids=token_ids[0], response=response))

    async def _compile_grammar(self, request: ChatRequest) -> GrammarMatcher | None:
        with self.observer.stage("grammar"):
            if GUIDED_DECODING not in self.decoder.supported_params:
                reject_structured_output(request, self.decoder.name)
                return None
            return await self.grammars.compile(request, self.inputs.prompts.opens_reasoning)

    async def _decode(
        self, builders: Sequence[ResponseBuilder], requests: Sequence[DecodeRequest], timer: RequestTimer
    ) -> AsyncGenerator[tuple[int, Token], None]:
        streams = [self.decoder.decode(request) for request in requests]
        with self.observer.stage("decode"):
            async with contextlib.aclosing(merge_streams(streams)) as tokens:
                async for index, token in tokens:
                    timer.token(index)
                    yield index, token
                    if builders[index].finished:
                        await streams[index].aclose()

    def _response_builders(
        self, request: ChatRequest, inputs: Inputs, lora: ActiveLora | None, *, guided: bool
    ) -> list[ResponseBuilder]:
        prompt = inputs.prompt
        counts = PromptCounts(
            prompt_tokens=len(prompt),
            image_tokens=prompt.image_tokens,
            video_tokens=prompt.video_tokens,
            pruned_tokens=prompt.pruned_tokens,
        )
        response_id = f"chatcmpl-{uuid.uuid4().hex}"
        created = int(time.time())
        return [
            ResponseBuilder(
                tokenizer=self.inputs.prompts.tokenizer,
                request=request,
                id=response_id,
                created=created,
                model=lora.weights.name if lora else self.name,
                counts=counts,
                index=index,
                guided=guided,
                conversation=self.spec.conversation,
                supports_reasoning=request.parses_reasoning and self.inputs.prompts.supports_reasoning,
                opens_reasoning=request.parses_reasoning and prompt.opens_reasoning,
                coordinates=inputs.coordinates,
            )
            for index in range(request.n)
        ]

    def _limited(self, request: ChatRequest, sampling: Sampling, prompt_tokens: int) -> Sampling:
        max_tokens = self.inputs.prompts.max_model_len - prompt_tokens
        if not request.uses_rest_of_context:
            max_tokens = min(sampling.max_tokens or DEFAULT_MAX_TOKENS, max_tokens)
        if sampling.min_tokens > max_tokens:
            raise InvalidParameter(
                f"`min_tokens` is {sampling.min_tokens}, but the completion can have at most {max_tokens} tokens.",
                param="min_tokens",
            )
        return replace(sampling, max_tokens=max_tokens)
