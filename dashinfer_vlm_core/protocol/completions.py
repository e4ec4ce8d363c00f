"""CompletionRequest: a request of OpenAI's legacy completions, which becomes a request for each of its prompts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, Tag, model_validator

from .base import Array, Count, Name, Text
from .body import CheckedBody
from .fields import IGNORED_FIELDS, REJECTED_FIELDS, RejectedFields
from .request import DEFAULT_MODEL, MAX_COMPLETIONS, ChatRequest, OfflineRequest, StreamOptions, check_stream_options
from .validation_errors import invalid, renamed_errors, unsupported
from .vllm_xargs import TokenId

MAX_PROMPTS = 256
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` in legacy completions."""

_MESSAGES_ONLY = "It applies to messages. Send them to /v1/chat/completions."

REJECTED_IN_COMPLETIONS: RejectedFields = {
    "suffix": (("",), "The models do not fill in text. Remove it, and describe the task in the prompt."),
    **{name: rule for name, rule in REJECTED_FIELDS.items() if name not in {"best_of", "echo"}},
    "prompt_embeds": ((), "Send text or token IDs as `prompt`."),
    # Fields of chat completion requests.
    "messages": ((), "Use `prompt`, or send messages to /v1/chat/completions."),
    "max_completion_tokens": ((), "Use `max_tokens`."),
    "top_logprobs": ((), "Use `logprobs`, which is the number of alternatives."),
    "coordinates": (("model",), _MESSAGES_ONLY),
    "tools": (([],), _MESSAGES_ONLY),
    "tool_choice": (("none",), _MESSAGES_ONLY),
    "parallel_tool_calls": ((), _MESSAGES_ONLY),
    "reasoning_effort": ((), _MESSAGES_ONLY),
    "thinking": ((), _MESSAGES_ONLY),
    "chat_template_kwargs": (({},), _MESSAGES_ONLY),
    "media_io_kwargs": (({},), _MESSAGES_ONLY),
    "mm_processor_kwargs": (({},), _MESSAGES_ONLY),
}

_PASSED_ON = ChatRequest.model_fields.keys() - REJECTED_IN_COMPLETIONS.keys()
"""Fields with the same meaning as in chat requests."""


def _prompt_shape(value: object) -> str | None:
    if isinstance(value, str):
        return "string"
    if not isinstance(value, (list, tuple)):
        return None
    if value and isinstance(value[0], str):
        return "strings"
    return "arrays" if value and isinstance(value[0], (list, tuple)) else "ids"


_Ids = Annotated[Array[TokenId], Field(min_length=1)]
_Prompt = Annotated[
    Annotated[Text, Tag("string")]
    | Annotated[Annotated[Array[Text], Field(max_length=MAX_PROMPTS)], Tag("strings")]
    | Annotated[_Ids, Tag("ids")]
    | Annotated[Annotated[Array[_Ids], Field(max_length=MAX_PROMPTS)], Tag("arrays")],
    Discriminator(
        _prompt_shape,
        custom_error_type="string_or_array",
        custom_error_message="must be a string or an array",
    ),
]


class PlainRequest(OfflineRequest):
    """A request for the continuation of one prompt, with everything that the model writes as its text."""

    parses_reasoning: ClassVar[bool] = False


class CompletionRequest(CheckedBody):
    """A request of legacy completions: one or several prompts, which are continued without a chat template.

    Fields of chat requests that do not concern messages, such as `temperature` and `top_k`, are passed on.

    Attributes:
        prompt: a text in which special tokens are recognized, token IDs, or a list of either.
        echo: whether the prompt is the beginning of each text.
        logprobs: the number of alternatives of each token whose log probabilities are returned.
        best_of: the same as `n`: completions are not ranked.
    """

    _rejected_fields: ClassVar[RejectedFields] = REJECTED_IN_COMPLETIONS
    _accepted_fields: ClassVar[Collection[str]] = _PASSED_ON | IGNORED_FIELDS | REJECTED_IN_COMPLETIONS.keys()

    prompt: _Prompt
    model: Name = DEFAULT_MODEL
    max_tokens: Count = DEFAULT_COMPLETION_TOKENS
    n: Annotated[int, Field(ge=1, le=MAX_COMPLETIONS)] = 1
    best_of: Count | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> CompletionRequest:
        if self.best_of not in {None, self.n}:
            raise unsupported(
                "best_of", f"is not supported, got {self.best_of}. Completions are not ranked. Remove it, and use `n`."
            )
        if self.echo and self.logprobs is not None:
            raise unsupported(
                "echo",
                "is not supported with `logprobs`. Log probabilities are available for completion tokens only. Remove"
                " one of them.",
            )
        count = len(self.prompts()) * self.n
        if count > MAX_PROMPTS:
            raise invalid(
                "n", f"times the number of prompts is {count}, but the limit is {MAX_PROMPTS}. Send several requests."
            )
        check_stream_options(self.stream_options, stream=self.stream)
        if self.stream_options and self.stream_options.include_initial_usage:
            raise unsupported(
                "stream_options.include_initial_usage", "is not supported. Use `stream_options.include_usage`."
            )
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that contains the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """Return the prompts, each a text or token IDs."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return (prompt,)
        return tuple(prompt)

    def to_requests(self) -> tuple[PlainRequest, ...]:
        """Return a streamed request with its usage for each prompt.

        Raises:
            InvalidParameter, UnsupportedParameter: like `ChatRequest.parse`; `param` has the names of this request.
        """
        first, *others = self.prompts()
        with renamed_errors(partial(self.rename, 0)):
            request = PlainRequest.parse({**self._shared_fields(), "prompt": first})
        return (request, *(request.model_copy(update={"prompt": prompt}) for prompt in others))

    def rename(self, index: int, path: str) -> str:
        """Return the field of this request for a field of the request for the prompt with this index."""
        if path in {"prompt", "prompt_token_ids", "messages", "tokens"}:
            return "prompt" if len(self.prompts()) == 1 else f"prompt[{index}]"
        return "logprobs" if path == "top_logprobs" else path

    def _shared_fields(self) -> Mapping[str, Any]:
        given = {name: value for name, value in (self.model_extra or {}).items() if name in _PASSED_ON}
        logprobs = {} if self.logprobs is None else {"logprobs": True, "top_logprobs": self.logprobs}
        return {
            **given,
            **logprobs,
            "model": self.model,
            "max_tokens": self.max_tokens,
            "n": self.n,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
