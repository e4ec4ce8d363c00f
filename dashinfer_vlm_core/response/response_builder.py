"""The answer: tokens -> text -> objects of OpenAI's API. No input or output happens here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
from openai.types.completion_usage import PromptTokensDetails

from ..decoders import FinishReason, Token
from ..errors import DecoderFailed
from ..protocol import ChatRequest
from ..structured_output.tool_parser import ContentDelta, ParserEvent, ToolCallParser, ToolCallStart
from ..tokenization.conversation import HERMES, ConversationFormat
from ..tokenization.detokenizer import IncrementalDetokenizer
from ..tokenization.stop_strings import StopStringMatcher

ChoiceFinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]

LOGPROB_FLOOR = -9999.0
"""OpenAI's number for "very unlikely": minus infinity is no JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptCounts:
    """Lengths of the prompt, for the usage.

    Attributes:
        prompt_tokens: all of its tokens.
        image_tokens: those of them that stand for pictures.
        video_tokens: those of them that stand for videos.
    """

    prompt_tokens: int
    image_tokens: int = 0
    video_tokens: int = 0


class ResponseBuilder:
    """One answer in the making, streamed or whole: both are cut from the same text.

    The text is that of `tokenizer.decode(..., skip_special_tokens=True)`, without the token that ends the answer, up to
    the first stop string. Log probabilities are listed for each token that has a part in that text: not for special
    tokens, nor for those that begin in a stop string. `completion_tokens` counts every token that was decoded, the one
    that ends the answer included.

    Args:
        tokenizer: of the byte-level kind.
        request: says which stop strings, log probabilities and usage are wanted.
        id: of the answer, the same in all chunks.
        created: Unix time in seconds.
        model: name of the model in the answer.
        counts: lengths of the prompt.
        index: which of the request's answers it is.
        guided: whether a grammar guides its calls.
        conversation: how the model writes calls.

    Attributes:
        completion_tokens: tokens of the answer so far.
        cached_tokens: tokens of the prompt that were read from a cache.

    Raises:
        CheckpointError: the tokenizer is of another kind.
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
    ) -> None:
        self.id = id
        self._index = index
        self._envelope: dict[str, Any] = {"id": id, "created": created, "model": model}
        self._counts = counts
        self._wants_logprobs = request.logprobs
        self._wants_usage = request.include_usage
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stops = StopStringMatcher(request.stop_strings)
        tools = {tool.function.name for tool in request.callable_tools}
        self._reader = ToolCallParser(tools, guided=guided, conversation=conversation)
        self._one_call = request.parallel_tool_calls is False
        self._text: list[str] = []
        self._calls: list[_Call] = []
        self._entries: list[_Entry] = []
        self._listed: list[_Entry] = []
        self.completion_tokens: int = 0
        self.cached_tokens: int = 0
        self._reason: FinishReason | None = None

    @property
    def finished(self) -> bool:
        """Whether the answer is complete; nothing may be fed from then on."""
        return self._stops.matched or self._reason is not None or self._called_once

    @property
    def _called_once(self) -> bool:
        """Whether the only call that is allowed is complete."""
        return self._one_call and self._reader.complete > 0

    def first_chunk(self) -> ChatCompletionChunk:
        """The first chunk of a stream: who speaks."""
        return self._chunk(ChoiceDelta(role="assistant", content="", refusal=None))

    def add_token(self, token: Token) -> list[ChatCompletionChunk]:
        """Take the next token; returns what of the text can be shown now.

        Held back are bytes of an unfinished character, and text that may become a stop string.
        """
        self.completion_tokens += 1
        self.cached_tokens += token.cached_tokens
        self._reason = token.finish_reason
        if token.finish_reason == "stop":
            return []
        begin = self._detokenizer.position
        text = self._detokenizer.feed(token.id)
        if self._wants_logprobs and self._detokenizer.is_visible(token.id):
            self._entries.append(_Entry(begin, self._logprob(token)))
        return self._show(self._reader.feed(self._stops.feed(text)))

    def final_chunks(self) -> list[ChatCompletionChunk]:
        """The last chunks of this answer: what was held back, and why it ends.

        Raises:
            DecoderFailed: the decoder stopped without saying why.
        """
        return [*self._flush(), self._chunk(ChoiceDelta(), finish=self._finish_reason())]

    def usage_chunks(self, others: Sequence[ResponseBuilder] = ()) -> list[ChatCompletionChunk]:
        """The last chunk of a stream, if it was asked for: the usage, that of the request's other answers included."""
        if not self._wants_usage:
            return []
        usage = self.usage(others)
        return [ChatCompletionChunk(**self._envelope, object="chat.completion.chunk", choices=[], usage=usage)]

    def completion(self, others: Sequence[ResponseBuilder] = ()) -> ChatCompletion:
        """The whole answer, with the request's other answers.

        Raises:
            DecoderFailed: the decoder stopped without saying why.
        """
        choices = [reply.choice() for reply in (self, *others)]
        return ChatCompletion(**self._envelope, object="chat.completion", choices=choices, usage=self.usage(others))

    def choice(self) -> Choice:
        """This answer among those of a request; raises as `completion`."""
        self._flush()
        finish = self._finish_reason()
        text = "".join(self._text)
        message = ChatCompletionMessage(role="assistant", content=text or (None if self._calls else ""), refusal=None)
        if self._calls:
            message.tool_calls = [call.message() for call in self._calls]
        logprobs = [entry.logprob for entry in self._listed]
        return Choice(
            index=self._index,
            message=message,
            logprobs=ChoiceLogprobs(content=logprobs, refusal=None) if self._wants_logprobs else None,
            finish_reason=finish,
        )

    def usage(self, others: Sequence[ResponseBuilder] = ()) -> CompletionUsage:
        """Tokens so far, of this answer and of `others`; the prompt counts once, and as cached where none had to read
        it."""
        replies = (self, *others)
        completion = sum(reply.completion_tokens for reply in replies)
        cached = min(reply.cached_tokens for reply in replies)
        details = {"image_tokens": self._counts.image_tokens, "video_tokens": self._counts.video_tokens}
        return CompletionUsage(
            prompt_tokens=self._counts.prompt_tokens,
            completion_tokens=completion,
            total_tokens=self._counts.prompt_tokens + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached, **details),
        )

    def _finish_reason(self) -> ChoiceFinishReason:
        if not self.finished:
            raise DecoderFailed("The decoder ended the answer without saying why. Try again.")
        if self._called_once or (self._reason == "stop" and self._reader.complete):
            return "tool_calls"
        return "stop" if self._stops.matched else self._reason or "stop"

    def _flush(self) -> list[ChatCompletionChunk]:
        rest = self._stops.feed(self._detokenizer.flush())
        events = self._reader.feed(rest + self._stops.flush())
        return self._show([*events, *self._reader.flush()])

    def _show(self, events: list[ParserEvent]) -> list[ChatCompletionChunk]:
        return [self._shown(event) for event in events]

    def _shown(self, event: ParserEvent) -> ChatCompletionChunk:
        if isinstance(event, ContentDelta):
            self._text.append(event.text)
            return self._chunk(ChoiceDelta(content=event.text), self._list(event))
        if isinstance(event, ToolCallStart):
            self._calls.append(_Call(event.id, event.name))
            function = ChoiceDeltaToolCallFunction(name=event.name, arguments="")
            call = ChoiceDeltaToolCall(index=event.index, id=event.id, type="function", function=function)
        else:
            self._calls[-1].arguments.append(event.text)
            call = ChoiceDeltaToolCall(index=event.index, function=ChoiceDeltaToolCallFunction(arguments=event.text))
        return self._chunk(ChoiceDelta(tool_calls=[call]))

    def _list(self, said: ContentDelta) -> list[_Entry]:
        """The log probabilities of the tokens that begin in a piece of the content; those before it are in calls."""
        end = said.begin + len(said.text)
        before = [entry for entry in self._entries if entry.begin < end]
        self._entries = self._entries[len(before) :]
        entries = [entry for entry in before if entry.begin >= said.begin]
        self._listed += entries
        return entries

    def _chunk(
        self, delta: ChoiceDelta, entries: list[_Entry] | None = None, *, finish: ChoiceFinishReason | None = None
    ) -> ChatCompletionChunk:
        """A chunk as OpenAI sends it: nulls are explicit, `usage` is there if the stream will end with one."""
        logprobs = None
        if self._wants_logprobs and entries is not None:
            logprobs = ChunkLogprobs(content=[entry.logprob for entry in entries], refusal=None)
        choice = ChunkChoice(index=self._index, delta=delta, logprobs=logprobs, finish_reason=finish)
        usage = {"usage": None} if self._wants_usage else {}
        return ChatCompletionChunk(**self._envelope, object="chat.completion.chunk", choices=[choice], **usage)

    def _logprob(self, token: Token) -> ChatCompletionTokenLogprob:
        assert token.logprob is not None, "the engine asked the decoder for log probabilities"
        top = [TopLogprob(**self._described(*alternative)) for alternative in token.top_logprobs]
        return ChatCompletionTokenLogprob(**self._described(token.id, token.logprob), top_logprobs=top)

    def _described(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._detokenizer.token_bytes(token_id)
        return {
            "token": data.decode("utf-8", "replace"),
            "bytes": list(data),
            "logprob": max(logprob, LOGPROB_FLOOR),
        }


@dataclass(frozen=True, slots=True)
class _Entry:
    """Log probabilities of one token, and the character of the text that it begins at."""

    begin: int
    logprob: ChatCompletionTokenLogprob


@dataclass(slots=True)
class _Call:
    """A call in the making."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def message(self) -> ChatCompletionMessageFunctionToolCall:
        function = Function(name=self.name, arguments="".join(self.arguments))
        return ChatCompletionMessageFunctionToolCall(id=self.id, type="function", function=function)
