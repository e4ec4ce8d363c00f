"""Responses: tokens to text to objects of OpenAI's API, without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import tokenizers
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage, ChatCompletionTokenLogprob
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta, ChoiceDeltaToolCall, ChoiceDeltaToolCallFunction
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.chat.chat_completion_message_function_tool_call import (
    ChatCompletionMessageFunctionToolCall,
    Function,
)
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_usage import CompletionTokensDetails, PromptTokensDetails

from ..decoders import FinishReason, Token
from ..errors import DecoderFailed
from ..models.coordinates import CoordinateStream, ImageCoordinates
from ..protocol import ChatRequest
from ..structured_output.tool_parser import (
    ContentDelta,
    ParserEvent,
    ToolCallArgumentsDelta,
    ToolCallParser,
    ToolCallStart,
)
from ..tokenization.conversation import HERMES, ConversationFormat
from ..tokenization.detokenizer import IncrementalDetokenizer
from ..tokenization.stop_strings import StopStringMatcher
from .reasoning_parser import ReasoningDelta, ReasoningEvent, ReasoningParser

ChoiceFinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]

LOGPROB_FLOOR = -9999.0
"""OpenAI's value for "very unlikely": JSON has no minus infinity."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptCounts:
    """Token counts of the prompt, for the usage.

    Attributes:
        prompt_tokens: all tokens.
        image_tokens: the placeholders of images among them.
        video_tokens: the placeholders of videos among them.
        pruned_tokens: visual tokens that are not among them.
    """

    prompt_tokens: int
    image_tokens: int = 0
    video_tokens: int = 0
    pruned_tokens: int = 0


class ResponseBuilder:
    """Builds one choice of a response, streamed or not, from the same state.

    The text equals `tokenizer.decode` with the request's `skip_special_tokens`, up to the token or the first stop
    string that ends the completion; these belong to it with `include_stop_str_in_output`. Log probabilities are listed
    for each token that begins in this text and contributes to it. `completion_tokens` counts every decoded token,
    including the one that ends the completion.

    Args:
        tokenizer: a byte-level tokenizer.
        request: specifies stop strings, log probabilities and usage.
        id: the response's id, the same in all chunks.
        created: Unix time in seconds.
        model: the model's name in the response.
        counts: token counts of the prompt.
        index: the index of the choice.
        guided: whether a grammar constrains the completion.
        conversation: how the model writes tool calls and reasoning.
        supports_reasoning: whether the completion may begin with reasoning, which becomes `reasoning_content`. Stop
            strings and log probabilities concern only the text after it.
        opens_reasoning: whether the prompt ends with the tag that begins reasoning.
        coordinates: converts coordinates in the content and in tool calls; None leaves them as the model writes them.
            Log probabilities cannot be requested with it.

    Attributes:
        completion_tokens: the number of tokens so far.
        reasoning_tokens: the number of those that belong to the reasoning, including its last tag.
        cached_tokens: the number of prompt tokens that were read from a cache.

    Raises:
        CheckpointError: the tokenizer is not byte-level.
    """

    def __init__(
        self,
        *,
        tokenizer: tokenizers.Tokenizer,
        request: ChatRequest,
        id: str,  # noqa: A002 - the name of OpenAI's field
        created: int,
        model: str,
        counts: PromptCounts,
        index: int = 0,
        guided: bool = False,
        conversation: ConversationFormat = HERMES,
        supports_reasoning: bool = False,
        opens_reasoning: bool = False,
        coordinates: ImageCoordinates | None = None,
    ) -> None:
        self.id = id
        self._index = index
        self._envelope: dict[str, Any] = {"id": id, "created": created, "model": model}
        self._counts = counts
        self._wants_logprobs = request.logprobs
        self._wants_usage = request.include_usage
        self._wants_initial_usage = request.include_initial_usage
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=request.skip_special_tokens)
        self._includes_stop = request.include_stop_str_in_output
        self._stop_strings = StopStringMatcher(request.stop_strings, include=self._includes_stop)
        self._min_tokens = request.min_tokens
        self._min_text_end = 0  # index of the first character after `min_tokens` tokens; stop strings end after it
        functions = [tool.function for tool in request.callable_tools] if request.parses_tool_calls else []
        tools = {function.name: function.parameters for function in functions}
        self._must_call = bool(tools) and request.must_call
        self._tool_parser = ToolCallParser(tools, guided=guided, must_call=self._must_call, conversation=conversation)
        self._supports_reasoning = supports_reasoning
        self._reasoning_parser = ReasoningParser(conversation, started=opens_reasoning, enabled=supports_reasoning)
        self._coordinates = _CoordinateConverter(coordinates) if coordinates else None
        self._reasoning: list[str] = []
        self._text_begin: int | None = None  # index of the first character after the reasoning, in the generated text
        self._single_call = request.has_single_call
        self._text: list[str] = []
        self._content_end = 0  # index of the first character after the content so far, without the reasoning
        self._tool_calls: list[_ToolCall] = []
        self._pending_logprobs: list[_TokenLogprob] = []
        self._content_logprobs: list[_TokenLogprob] = []
        self.completion_tokens: int = 0
        self.reasoning_tokens: int = 0
        self.cached_tokens: int = 0
        self._reason: FinishReason | None = None

    @property
    def finished(self) -> bool:
        """Whether the completion is complete; no token may be added afterwards."""
        return self._stop_strings.matched or self._reason is not None or self._single_call_complete

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the completion; None if none did."""
        return self._stop_strings.match

    @property
    def final_text(self) -> str | None:
        """The text of a response that ended by itself; None if it was cut, is not complete or calls tools."""
        is_final = self.finished and self._finish_reason() == "stop" and not self._tool_calls
        return "".join(self._text) if is_final else None

    @property
    def _single_call_complete(self) -> bool:
        return self._single_call and self._tool_parser.complete > 0

    def add_token(self, token: Token) -> list[ChatCompletionChunk]:
        """Add the next token; return chunks for the text that is final, the first of them with the role.

        Bytes of an incomplete character and text that may become a stop string are held back.
        """
        chunks = self._add_token(token)
        return [self._first_chunk(), *chunks] if self.completion_tokens == 1 else chunks

    def _first_chunk(self) -> ChatCompletionChunk:
        """Return the chunk with the role, after the first token was added.

        Clients begin a block of text if its content is not null, even if it is empty.
        """
        begins_call = self._must_call or self._tool_parser.may_call
        chunk = self._chunk(ChoiceDelta(role="assistant", content=None if begins_call else "", refusal=None))
        if self._wants_initial_usage:
            chunk.usage = self.usage()
        return chunk

    def _add_token(self, token: Token) -> list[ChatCompletionChunk]:
        self.completion_tokens += 1
        self.cached_tokens += token.cached_tokens
        self._reason = token.finish_reason
        if token.finish_reason == "stop" and not self._includes_stop:
            return []
        self.reasoning_tokens += self._reasoning_parser.reasoning
        begin = self._detokenizer.position
        text = self._detokenizer.feed(token.id)
        if self.completion_tokens <= self._min_tokens:
            self._min_text_end = self._detokenizer.position
        if self._wants_logprobs and self._detokenizer.is_visible(token.id):
            self._pending_logprobs.append(_TokenLogprob(begin, self._logprob(token)))
        return self._chunks_for_reasoning(self._reasoning_parser.feed(text))

    def final_chunks(self) -> list[ChatCompletionChunk]:
        """Return the last chunks of this choice: the text that was held back, and the finish reason.

        Raises:
            DecoderFailed: the decoder stopped without a finish reason.
        """
        return [*self._flush(), self._chunk(ChoiceDelta(), finish=self._finish_reason())]

    def usage_chunks(self, others: Sequence[ResponseBuilder] = ()) -> list[ChatCompletionChunk]:
        """Return the usage chunk, which includes the request's other choices; nothing if it was not requested."""
        if not self._wants_usage:
            return []
        usage = self.usage(others)
        return [ChatCompletionChunk(**self._envelope, object="chat.completion.chunk", choices=[], usage=usage)]

    def completion(self, others: Sequence[ResponseBuilder] = ()) -> ChatCompletion:
        """Return the complete response, with the request's other choices.

        Raises:
            DecoderFailed: the decoder stopped without a finish reason.
        """
        choices = [builder.choice() for builder in (self, *others)]
        return ChatCompletion(**self._envelope, object="chat.completion", choices=choices, usage=self.usage(others))

    def choice(self) -> Choice:
        """Return this choice. Raises like `completion`."""
        self._flush()
        finish = self._finish_reason()
        text = "".join(self._text)
        has_other = self._tool_calls or self._reasoning
        message = ChatCompletionMessage(role="assistant", content=text or (None if has_other else ""), refusal=None)
        if self._reasoning:
            message.reasoning_content = "".join(self._reasoning)  # type: ignore[attr-defined]  # as vLLM and LiteLLM name it
        if self._tool_calls:
            message.tool_calls = [call.message() for call in self._tool_calls]
        logprobs = [entry.logprob for entry in self._content_logprobs]
        return Choice(
            index=self._index,
            message=message,
            logprobs=ChoiceLogprobs(content=logprobs, refusal=None) if self._wants_logprobs else None,
            finish_reason=finish,
            **self._stop_fields(),
        )

    def _stop_fields(self) -> dict[str, Any]:
        return {"stop_reason": self.stop_string} if self.stop_string else {}

    def usage(self, others: Sequence[ResponseBuilder] = ()) -> CompletionUsage:
        """Return the usage of this choice and `others` so far.

        The prompt counts once. Its cached tokens are the minimum over the choices: those that no choice computed.
        """
        builders = (self, *others)
        completion = sum(builder.completion_tokens for builder in builders)
        cached = min(builder.cached_tokens for builder in builders)
        reasoning = CompletionTokensDetails(reasoning_tokens=sum(builder.reasoning_tokens for builder in builders))
        details = {"image_tokens": self._counts.image_tokens, "video_tokens": self._counts.video_tokens}
        if self._counts.pruned_tokens:
            details["pruned_tokens"] = self._counts.pruned_tokens
        return CompletionUsage(
            prompt_tokens=self._counts.prompt_tokens,
            completion_tokens=completion,
            total_tokens=self._counts.prompt_tokens + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached, **details),
            **({"completion_tokens_details": reasoning} if self._supports_reasoning else {}),
        )

    def _finish_reason(self) -> ChoiceFinishReason:
        if not self.finished:
            raise DecoderFailed("The decoder ended the completion without a finish reason. Try again.")
        if self._reason == "length" and not (self._stop_strings.matched or self._single_call_complete):
            return "length"
        return "tool_calls" if self._tool_parser.complete else "stop"

    def _flush(self) -> list[ChatCompletionChunk]:
        reasoning = [*self._reasoning_parser.feed(self._detokenizer.flush()), *self._reasoning_parser.flush()]
        chunks = self._chunks_for_reasoning(reasoning)
        events = self._tool_parser.flush()
        chunks += self._chunks_for([*self._until_stop_string(events), *self._held_content()])
        return [*chunks, *(map(self._chunk_for, self._coordinates.flush()) if self._coordinates else ())]

    def _feed_text(self, text: str) -> list[ChatCompletionChunk]:
        return self._chunks_for(list(self._until_stop_string(self._tool_parser.feed(text))))

    def _until_stop_string(self, events: Iterable[ParserEvent]) -> Iterator[ParserEvent]:
        """Yield events up to the first stop string in the content: clients do not see the text of calls."""
        for event in events:
            if self._stop_strings.matched:
                return
            if isinstance(event, ContentDelta):
                begin = event.begin - self._stop_strings.num_held
                ignored = max(self._min_text_end - (self._text_begin or 0) - event.begin, 0)
                if text := self._stop_strings.feed(event.text, ignored=ignored):
                    yield ContentDelta(begin=begin, text=text)
                self._content_end = event.begin + len(event.text)
            else:
                yield from self._held_content()
                yield event

    def _held_content(self) -> Iterator[ContentDelta]:
        if held := self._stop_strings.flush():
            yield ContentDelta(begin=self._content_end - len(held), text=held)

    def _chunks_for_reasoning(self, events: list[ReasoningEvent]) -> list[ChatCompletionChunk]:
        chunks: list[ChatCompletionChunk] = []
        for event in events:
            if isinstance(event, ReasoningDelta):
                self._reasoning.append(event.text)
                chunks.append(self._chunk(ChoiceDelta(reasoning_content=event.text)))
            else:
                self._text_begin = event.begin if self._text_begin is None else self._text_begin
                chunks += self._feed_text(event.text)
        return chunks

    def _chunks_for(self, events: list[ParserEvent]) -> list[ChatCompletionChunk]:
        events = self._coordinates.feed(events) if self._coordinates else events
        return [self._chunk_for(event) for event in events]

    def _chunk_for(self, event: ParserEvent) -> ChatCompletionChunk:
        if isinstance(event, ContentDelta):
            self._text.append(event.text)
            return self._chunk(ChoiceDelta(content=event.text), self._logprobs_for(event))
        if isinstance(event, ToolCallStart):
            self._tool_calls.append(_ToolCall(event.id, event.name))
            function = ChoiceDeltaToolCallFunction(name=event.name, arguments="")
            call = ChoiceDeltaToolCall(index=event.index, id=event.id, type="function", function=function)
        else:
            self._tool_calls[-1].arguments.append(event.text)
            call = ChoiceDeltaToolCall(index=event.index, function=ChoiceDeltaToolCallFunction(arguments=event.text))
        return self._chunk(ChoiceDelta(tool_calls=[call]))

    def _logprobs_for(self, delta: ContentDelta) -> list[_TokenLogprob]:
        """Return the log probabilities of the tokens that begin in a content delta; earlier ones are in tool calls."""
        begin = delta.begin + (self._text_begin or 0)
        end = begin + len(delta.text)
        before_end = [entry for entry in self._pending_logprobs if entry.begin < end]
        self._pending_logprobs = self._pending_logprobs[len(before_end) :]
        entries = [entry for entry in before_end if entry.begin >= begin]
        self._content_logprobs += entries
        return entries

    def _chunk(
        self,
        delta: ChoiceDelta,
        entries: list[_TokenLogprob] | None = None,
        *,
        finish: ChoiceFinishReason | None = None,
    ) -> ChatCompletionChunk:
        """Return a chunk as OpenAI sends it: nulls are explicit, and `usage` is present if the stream ends with it."""
        logprobs = None
        if self._wants_logprobs and entries is not None:
            logprobs = ChunkLogprobs(content=[entry.logprob for entry in entries], refusal=None)
        stop = self._stop_fields() if finish else {}
        choice = ChunkChoice(index=self._index, delta=delta, logprobs=logprobs, finish_reason=finish, **stop)
        usage = {"usage": None} if self._wants_usage else {}
        return ChatCompletionChunk(**self._envelope, object="chat.completion.chunk", choices=[choice], **usage)

    def _logprob(self, token: Token) -> ChatCompletionTokenLogprob:
        assert token.logprob is not None, "log probabilities were requested from the decoder"
        top = [TopLogprob(**self._logprob_fields(*alternative)) for alternative in token.top_logprobs]
        return ChatCompletionTokenLogprob(**self._logprob_fields(token.id, token.logprob), top_logprobs=top)

    def _logprob_fields(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._detokenizer.token_bytes(token_id)
        return {
            "token": data.decode("utf-8", "replace"),
            "bytes": list(data),
            "logprob": max(logprob, LOGPROB_FLOOR),
        }


class _CoordinateConverter:
    """Converts the text of a parser's events to coordinates of the original image.

    `begin` of a content delta is still an index in the text of the model.
    """

    def __init__(self, image: ImageCoordinates) -> None:
        self._image = image
        self._stream = CoordinateStream(image)
        self._last: ContentDelta | ToolCallArgumentsDelta | None = None

    def feed(self, events: Iterable[ParserEvent]) -> list[ParserEvent]:
        """Return the events whose text is final. The text of the content, and of each call, is converted separately."""
        converted: list[ParserEvent] = []
        for event in events:
            if isinstance(event, ToolCallStart) or type(event) is not type(self._last):
                converted += self.flush()
            if isinstance(event, ToolCallStart):
                converted.append(event)
                continue
            self._last = event
            converted += self._with_text(self._stream.feed(event.text))
        return converted

    def flush(self) -> list[ParserEvent]:
        """Return the event for the text that was held back."""
        return self._with_text(self._stream.flush())

    def _with_text(self, text: str) -> list[ParserEvent]:
        return [replace(self._last, text=text)] if text and self._last else []


@dataclass(frozen=True, slots=True)
class _TokenLogprob:
    """Log probabilities of one token, and the index of the character in the text at which it begins."""

    begin: int
    logprob: ChatCompletionTokenLogprob


@dataclass(slots=True)
class _ToolCall:
    """A tool call that is being parsed."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def message(self) -> ChatCompletionMessageFunctionToolCall:
        function = Function(name=self.name, arguments="".join(self.arguments))
        return ChatCompletionMessageFunctionToolCall(id=self.id, type="function", function=function)
