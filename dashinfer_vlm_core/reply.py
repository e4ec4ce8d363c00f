"""The answer: tokens -> text -> objects of OpenAI's API. No input or output happens here."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from typing import Any

import tokenizers.decoders
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage, ChatCompletionTokenLogprob
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_usage import PromptTokensDetails

from .decoder import FinishReason, Token
from .errors import CheckpointError, DecoderFailed
from .schema import ChatRequest

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


class Reply:
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
    ) -> None:
        self.id = id
        self._envelope: dict[str, Any] = {"id": id, "created": created, "model": model}
        self._counts = counts
        self._wants_logprobs = request.logprobs
        self._wants_usage = request.include_usage
        self._detokeniser = Detokeniser(tokenizer)
        self._stops = StopStrings(request.stop_strings)
        self._text: list[str] = []
        self._shown = 0
        self._entries: list[_Entry] = []
        self._entries_shown = 0
        self._completion_tokens = 0
        self._cached_tokens = 0
        self._reason: FinishReason | None = None

    @property
    def finished(self) -> bool:
        """Whether the answer is complete; nothing may be fed from then on."""
        return self._stops.matched or self._reason is not None

    def opening(self) -> ChatCompletionChunk:
        """The first chunk of a stream: who speaks."""
        return self._chunk(ChoiceDelta(role="assistant", content="", refusal=None))

    def feed(self, token: Token) -> list[ChatCompletionChunk]:
        """Take the next token; returns what of the text can be shown now.

        Held back are bytes of an unfinished character, and text that may become a stop string.
        """
        self._completion_tokens += 1
        self._cached_tokens += token.cached
        self._reason = token.finish
        if token.finish == "stop":
            return []
        begin = self._detokeniser.position
        text = self._detokeniser.feed(token.id)
        if self._wants_logprobs and self._detokeniser.shows(token.id):
            self._entries.append(_Entry(begin, self._logprob(token)))
        return self._show(self._stops.feed(text))

    def closing(self) -> list[ChatCompletionChunk]:
        """The last chunks of a stream: what was held back, why the answer ends and, if asked for, the usage.

        Raises:
            DecoderFailed: the decoder stopped without saying why.
        """
        chunks = [*self._flush(), self._chunk(ChoiceDelta(), finish=self._finish_reason())]
        if self._wants_usage:
            chunks.append(
                ChatCompletionChunk(**self._envelope, object="chat.completion.chunk", choices=[], usage=self.usage())
            )
        return chunks

    def completion(self) -> ChatCompletion:
        """The whole answer.

        Raises:
            DecoderFailed: the decoder stopped without saying why.
        """
        self._flush()
        logprobs = [entry.logprob for entry in self._entries[: self._entries_shown]]
        choice = Choice(
            index=0,
            message=ChatCompletionMessage(role="assistant", content="".join(self._text), refusal=None),
            logprobs=ChoiceLogprobs(content=logprobs, refusal=None) if self._wants_logprobs else None,
            finish_reason=self._finish_reason(),
        )
        return ChatCompletion(**self._envelope, object="chat.completion", choices=[choice], usage=self.usage())

    def usage(self) -> CompletionUsage:
        """Tokens so far."""
        details = {"image_tokens": self._counts.image_tokens, "video_tokens": self._counts.video_tokens}
        return CompletionUsage(
            prompt_tokens=self._counts.prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=self._counts.prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._cached_tokens, **details),
        )

    def _finish_reason(self) -> FinishReason:
        if self._stops.matched:
            return "stop"
        if self._reason is None:
            raise DecoderFailed("The decoder ended the answer without saying why. Try again.")
        return self._reason

    def _flush(self) -> list[ChatCompletionChunk]:
        rest = self._stops.feed(self._detokeniser.flush())
        return self._show(rest + self._stops.flush())

    def _show(self, text: str) -> list[ChatCompletionChunk]:
        if not text:
            return []
        self._text.append(text)
        self._shown += len(text)
        begin = self._entries_shown
        while self._entries_shown < len(self._entries) and self._entries[self._entries_shown].begin < self._shown:
            self._entries_shown += 1
        return [self._chunk(ChoiceDelta(content=text), self._entries[begin : self._entries_shown])]

    def _chunk(
        self, delta: ChoiceDelta, entries: list[_Entry] | None = None, *, finish: FinishReason | None = None
    ) -> ChatCompletionChunk:
        """A chunk as OpenAI sends it: nulls are explicit, `usage` is there if the stream will end with one."""
        logprobs = None
        if self._wants_logprobs and entries is not None:
            logprobs = ChunkLogprobs(content=[entry.logprob for entry in entries], refusal=None)
        choice = ChunkChoice(index=0, delta=delta, logprobs=logprobs, finish_reason=finish)
        usage = {"usage": None} if self._wants_usage else {}
        return ChatCompletionChunk(**self._envelope, object="chat.completion.chunk", choices=[choice], **usage)

    def _logprob(self, token: Token) -> ChatCompletionTokenLogprob:
        assert token.logprob is not None, "the engine asked the decoder for log probabilities"
        top = [TopLogprob(**self._described(*alternative)) for alternative in token.top]
        return ChatCompletionTokenLogprob(**self._described(token.id, token.logprob), top_logprobs=top)

    def _described(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._detokeniser.spell(token_id)
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


def _byte_of_character() -> dict[str, int]:
    """The alphabet in which byte-level vocabularies are written: GPT-2's `bytes_to_unicode`, read backwards.

    Printable bytes stand for themselves, all others, in order, for the characters from 256 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


class Detokeniser:
    """Token ids to text, one by one, in time linear in the text.

    `tokenizers.decoders.DecodeStream` gives the same text, but decodes all it holds back again at each step, which is
    quadratic on a run of invalid bytes, and it does not tell the bytes of a token, which `logprobs` needs.

    Attributes:
        position: characters given so far.

    Raises:
        CheckpointError: the tokenizer is not byte-level.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        if not isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel):
            raise CheckpointError("The tokenizer of this checkpoint is not byte-level (`decoder` in tokenizer.json).")
        self.position = 0
        self._tokenizer = tokenizer
        self._special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def spell(self, token_id: int) -> bytes:
        """What a token stands for; nothing, for ids that the model has and the tokenizer has not."""
        token = self._tokenizer.id_to_token(token_id) or ""
        try:
            return bytes(_BYTE_OF_CHARACTER[character] for character in token)
        except KeyError:  # an added token is written as it is
            return token.encode()

    def shows(self, token_id: int) -> bool:
        """Whether a token has a part in the text."""
        return token_id not in self._special and bool(self.spell(token_id))

    def feed(self, token_id: int) -> str:
        """The characters that this token completes; invalid bytes become U+FFFD, special tokens nothing."""
        return self._decode(b"" if token_id in self._special else self.spell(token_id))

    def flush(self) -> str:
        """What is left at the end: U+FFFD if the last character was not completed."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        self.position += len(text)
        return text


@dataclass(slots=True)
class _Matcher:
    """Knuth, Morris and Pratt's search for one string, a character at a time.

    Attributes:
        state: length of the longest beginning of the string that the text ends with.
        fallback: for each length of a beginning, that of the longest shorter one that it ends with.
    """

    string: str
    state: int = 0
    fallback: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.fallback = [0, 0]
        for character in self.string[1:]:
            self.fallback.append(self._next(self.fallback[-1], character))

    def _next(self, state: int, character: str) -> int:
        while state and self.string[state] != character:
            state = self.fallback[state]
        return state + (self.string[state] == character)

    def step(self, character: str) -> bool:
        """Whether the text, with this character, ends with the string."""
        self.state = self._next(self.state, character)
        return self.state == len(self.string)


class StopStrings:
    """Cuts a text, given piece by piece, before the first stop string.

    First is the one that is complete first, whatever the pieces; of several that end at one character, the longest.

    Attributes:
        matched: whether one was found; all later text is dropped.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.matched = False
        self._matchers = [_Matcher(string) for string in strings]
        self._held = ""

    def feed(self, text: str) -> str:
        """What can be shown for sure: all but what a stop string may begin with."""
        if not self._matchers or self.matched:
            return "" if self.matched else text
        held, self._held = self._held + text, ""
        for index, character in enumerate(text, start=len(held) - len(text) + 1):
            if found := [len(matcher.string) for matcher in self._matchers if matcher.step(character)]:
                self.matched = True
                return held[: index - max(found)]
        kept = max(matcher.state for matcher in self._matchers)
        self._held = held[len(held) - kept :]
        return held[: len(held) - kept]

    def flush(self) -> str:
        """What was held back: at the end of the text it is no stop string."""
        held, self._held = self._held, ""
        return held
