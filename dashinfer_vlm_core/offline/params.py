"""SamplingParams: how answers are sampled, in vLLM's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..protocol import ChatRequest

_ANY_MESSAGE = {"role": "user", "content": "Hello"}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How an answer is sampled. Names and defaults are vLLM's, but for `max_tokens`.

    Attributes:
        n: answers of a prompt, 16 at most.
        temperature: 0 (the likeliest token) to 2.
        top_p: above 0, up to 1.
        top_k: keeps only the k likeliest tokens; 0 or -1 keeps all.
        max_tokens: most tokens of the answer. vLLM's default of 16 cuts most answers short: here None means 4096, or
            what the context leaves.
        min_tokens: tokens before which the answer does not end.
        stop: up to 4 strings that end the answer, and are no part of it.
        stop_token_ids: tokens that end the answer, besides the model's own.
        seed: same seed, same request, same answer.
        presence_penalty: -2 to 2.
        frequency_penalty: -2 to 2.
        repetition_penalty: 0.01 to 2; 1 does nothing.
        logit_bias: by token id, -100 to 100.
        logprobs: how many alternatives (0 to 20) are listed beside each token, with their log probabilities.
        ignore_eos: go on after the model's own end token.

    Raises:
        InvalidParameter: a value out of its range; `param` names it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        ChatRequest.parse({"messages": [_ANY_MESSAGE], **self.fields()})

    def fields(self) -> dict[str, Any]:
        """The same as fields of a request."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        if self.logprobs is not None:
            given |= {"logprobs": True, "top_logprobs": self.logprobs}
        return given
