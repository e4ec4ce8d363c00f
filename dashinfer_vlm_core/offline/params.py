"""SamplingParams and StructuredOutputsParams: parameters of a completion with vLLM's names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from ..protocol import ChatRequest
from ..protocol.fields import REJECTED_FIELDS, RejectedFields, reject_fields
from ..protocol.output import REJECTED_OPTIONS

T = TypeVar("T")

_ANY_MESSAGE = {"role": "user", "content": "Hello"}

_SAMPLING: RejectedFields = {
    **REJECTED_FIELDS,
    "detokenize": ((True,), "Outputs always have text and token IDs. Remove it."),
    "guided_decoding": ((), "Use `structured_outputs`, its name in newer versions of vLLM."),
    "spaces_between_special_tokens": ((True, False), "No spaces are added between tokens. Remove it."),
}
_STRUCTURED_OUTPUTS: RejectedFields = {
    **REJECTED_OPTIONS,
    "disable_fallback": ((True, False), "Every schema is enforced. Remove it."),
}


def explain_unsupported(rejected: RejectedFields) -> Callable[[type[T]], type[T]]:
    """Let a dataclass accept parameters of vLLM that have no effect, and reject others with the next step."""

    def decorate(cls: type[T]) -> type[T]:
        init = cls.__init__

        @functools.wraps(init)
        def checked_init(self: T, **given: Any) -> None:
            reject_fields(given, rejected)
            init(self, **{name: value for name, value in given.items() if name not in rejected})

        cls.__init__ = checked_init  # type: ignore[assignment]  # the same parameters, for type checkers
        return cls

    return decorate


@explain_unsupported(_STRUCTURED_OUTPUTS)
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the text of a completion has to be: one of these. Every token that would violate it is masked.

    Attributes:
        json: JSON that follows this schema, an object or its text.
        regex: a match of this regular expression, as a whole.
        choice: one of these texts.
        json_object: any JSON object.

    Raises:
        UnsupportedParameter: a parameter of vLLM that is not available.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    json_object: bool = False


@explain_unsupported(_SAMPLING)
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a completion. Names and defaults are vLLM's, except for `max_tokens`.

    Attributes:
        n: number of completions of a prompt, at most 16.
        temperature: 0 (greedy decoding) to 2.
        top_p: 0 (greedy decoding) to 1.
        top_k: samples from the k most likely tokens only; 0 or -1 disables it.
        min_p: 0 to 1; leaves out tokens that are less likely than the most likely one times `min_p`; 0 disables it.
        max_tokens: maximum number of tokens of the completion. vLLM's default of 16 truncates most completions; here
            None means 4096, or what remains of the context.
        min_tokens: minimum number of tokens before the completion can end.
        stop: up to 16 strings that end the completion.
        stop_token_ids: token IDs that end the completion, in addition to the model's own.
        seed: the same seed and request give the same completion.
        presence_penalty: -2 to 2.
        frequency_penalty: -2 to 2.
        repetition_penalty: 0.01 to 2; 1 disables it.
        no_repeat_ngram_size: prevents n-grams of this size from occurring twice in the completion; 0 disables it.
        extra_args: vLLM's arguments of logits processors, such as `ngram_size`; the request field `vllm_xargs`.
        logit_bias: token ID -> bias of -100 to 100.
        logprobs: number of alternatives (0 to 20) to return for each token, with their log probabilities.
        ignore_eos: continue after the model's own end token.
        skip_special_tokens: whether special tokens are left out of the text.
        include_stop_str_in_output: whether the stop string, or the token that ends the completion, is part of it.
        structured_outputs: what the text of the completion has to be; the same as a mapping is accepted, too.

    Raises:
        InvalidParameter: a value is invalid; `param` is its name.
        UnsupportedParameter: a parameter of vLLM that is not available.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    extra_args: Mapping[str, Any] | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        ChatRequest.parse({"messages": [_ANY_MESSAGE], **self.fields()})

    def fields(self) -> dict[str, Any]:
        """Return the parameters as fields of a request."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        if "extra_args" in given:
            given["vllm_xargs"] = given.pop("extra_args")
        if self.logprobs is not None:
            given |= {"logprobs": True, "top_logprobs": self.logprobs}
        return given
