"""Chunks of chat completions to objects of OpenAI's legacy completions, without I/O."""

from __future__ import annotations

import codecs
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletionChunk, ChatCompletionTokenLogprob
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import PromptTokensDetails

from ..errors import EngineError
from ..protocol.completions import CompletionRequest

Json: TypeAlias = dict[str, Any]
"""A chunk or a part of it: OpenAI's types do not allow that the reason is null until the last chunk."""


class CompletionBuilder:
    """Builds a response of legacy completions, streamed or not, from the chunks of a chat completion for each prompt.

    Of a streamed one, it keeps no texts and log probabilities.

    Args:
        request: the request.
        echoed: the text of each prompt that its choices begin with; empty for none.
    """

    def __init__(self, request: CompletionRequest, echoed: Sequence[str]) -> None:
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._n = request.n
        self._wants_usage = request.include_usage
        self._envelope: dict[str, Any] = {}
        self._choices = [
            _ChoiceBuilder(
                index,
                text=echoed[index // request.n],
                wants_logprobs=request.logprobs is not None,
                keeps_chunks=not request.stream,
            )
            for index in range(request.n * len(echoed))
        ]
        self._usages: list[CompletionUsage] = []

    def add_chunk(self, prompt: int, chunk: ChatCompletionChunk) -> list[Json]:
        """Add the next chunk for a prompt, given by its index; return chunks of the response."""
        if not self._envelope:
            self._envelope = {
                "id": self._id,
                "object": "text_completion",
                "created": chunk.created,
                "model": chunk.model,
            }
        if chunk.usage is not None:
            self._usages.append(chunk.usage)
        added = [self._choices[prompt * self._n + choice.index].add(choice) for choice in chunk.choices]
        return [self._chunk([choice]) for choice in added if choice]

    def usage_chunks(self) -> list[Json]:
        """Return the usage chunk; nothing if it was not requested."""
        usage = _total(self._usages).model_dump(exclude_unset=True)
        return [self._chunk([]) | {"usage": usage}] if self._wants_usage else []

    def completion(self) -> Completion:
        """Return the complete response, which is not streamed. It may be many megabytes.

        Raises:
            EngineError: a choice is not complete.
        """
        choices = [choice.choice() for choice in self._choices]
        return Completion(**self._envelope, choices=choices, usage=_total(self._usages))

    def _chunk(self, choices: list[Json]) -> Json:
        usage = {"usage": None} if self._wants_usage else {}
        return {**self._envelope, "choices": choices, **usage}


class _ChoiceBuilder:
    """One choice.

    Args:
        index: its index.
        text: what it begins with.
        wants_logprobs: whether log probabilities were requested.
        keeps_chunks: whether the whole choice is needed at the end.
    """

    def __init__(self, index: int, *, text: str, wants_logprobs: bool, keeps_chunks: bool) -> None:
        self._index = index
        self._keeps_chunks = keeps_chunks
        self._texts: list[str] = []
        self._begin = text
        self._logprobs = _LogprobConverter() if wants_logprobs else None
        self._tokens: list[_TokenLogprob] = []
        self._last: ChunkChoice | None = None

    def add(self, chunk: ChunkChoice) -> Json | None:
        """Add the next chunk; return the choice with its text, None if there is neither text nor the end, or if it is
        kept."""
        text = self._begin + (chunk.delta.content or "")
        self._begin = ""
        if chunk.finish_reason:
            self._last = chunk
        entries = (chunk.logprobs and chunk.logprobs.content) or ()
        tokens = self._logprobs.convert(entries) if self._logprobs else ()
        if self._keeps_chunks:
            self._texts.append(text)
            self._tokens += tokens
            return None
        return self._choice(text, tokens, chunk) if text or chunk.finish_reason else None

    def choice(self) -> CompletionChoice:
        """Return the whole choice. Raises EngineError if it is not complete."""
        if self._last is None:
            raise EngineError("The stream ended before the completion was complete. Try again.")
        fields = self._choice("".join(self._texts), self._tokens, self._last)
        if self._logprobs:
            fields["logprobs"] = Logprobs.construct(**fields["logprobs"])  # without validation, which copies them
        return CompletionChoice(**fields)

    def _choice(self, text: str, tokens: Sequence[_TokenLogprob], source: ChunkChoice) -> Json:
        return {
            "index": self._index,
            "text": text,
            "logprobs": _logprobs(tokens) if self._logprobs else None,
            "finish_reason": source.finish_reason,
            **(source.model_extra or {}),
        }


class _TokenLogprob(NamedTuple):
    """A token, and the index of the character in the text at which it begins."""

    offset: int
    token: str
    logprob: float
    top: dict[str, float]


class _LogprobConverter:
    """Converts log probabilities to the form of legacy completions."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def convert(self, entries: Iterable[ChatCompletionTokenLogprob]) -> list[_TokenLogprob]:
        """Convert those of the next tokens."""
        return [self._token(entry) for entry in entries]

    def _token(self, entry: ChatCompletionTokenLogprob) -> _TokenLogprob:
        offset = self._length
        self._length += len(self._decoder.decode(bytes(entry.bytes or ())))
        top = {_name(token): token.logprob for token in entry.top_logprobs} | {_name(entry): entry.logprob}
        return _TokenLogprob(offset, _name(entry), entry.logprob, top)


def _logprobs(tokens: Sequence[_TokenLogprob]) -> Json:
    return {
        "text_offset": [token.offset for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "tokens": [token.token for token in tokens],
        "top_logprobs": [token.top for token in tokens],
    }


def _name(token: ChatCompletionTokenLogprob | TopLogprob) -> str:
    """Return the text of a token; its bytes, as OpenAI writes them, if they are part of a character."""
    data = bytes(token.bytes or ())
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _total(usages: Sequence[CompletionUsage]) -> CompletionUsage:
    if len(usages) == 1:
        return usages[0]
    details = [usage.prompt_tokens_details for usage in usages]
    cached = sum((detail and detail.cached_tokens) or 0 for detail in details)
    return CompletionUsage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        total_tokens=sum(usage.total_tokens for usage in usages),
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )
