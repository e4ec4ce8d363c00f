"""Sampling: how the next token is chosen, the same for every door and every decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

GREEDY_BELOW = 1e-5
"""Temperatures below this count as 0, as in vLLM: they would choose the same token, but overflow single precision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Options of one answer, already checked: finite, and in the ranges of OpenAI's API.

    Made by `schema`; a decoder may rely on every bound stated here.

    Attributes:
        max_tokens: most tokens of the answer, at least 1; None lets the engine take what the context leaves.
        min_tokens: tokens before which no end-of-answer token may be chosen.
        temperature: 0 (greedy) to 2.
        top_p: above 0, up to 1; 1 keeps the whole distribution.
        top_k: 0 keeps the whole distribution, else only the k most likely tokens.
        seed: same seed, same request, same answer; None draws one.
        repetition_penalty: above 0; divides (or multiplies, if negative) logits of tokens in prompt and answer; 1 does
            nothing.
        presence_penalty: -2 to 2, subtracted once from logits of tokens already in the answer.
        frequency_penalty: -2 to 2, subtracted per occurrence of a token in the answer.
        logit_bias: token id to a bias of -100 to 100 that is added to its logit.
        stop_token_ids: tokens that end the answer, besides the model's own.
        ignore_eos: go on after the model's own end token.
        logprobs: None for none, else how many alternatives (0 to 20) are listed beside each chosen token.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def seeded(self, index: int) -> Sampling:
        """The options of the answer number `index` of a request: a seed counts on from the first one's."""
        return self if self.seed is None else replace(self, seed=(self.seed + index + 2**63) % 2**64 - 2**63)

    def requested_params(self) -> frozenset[str]:
        """The options that are set to something; a decoder that does not honour one of them cannot serve the
        request.
        """
        return frozenset(name for name in SAMPLING_PARAMETERS if getattr(self, name) != getattr(NEUTRAL, name))


SAMPLING_PARAMETERS = frozenset(item.name for item in fields(Sampling)) - {"max_tokens"}
"""What a decoder may or may not honour; every decoder supported_params `max_tokens`."""

NEUTRAL = Sampling()
"""Leaves the model's own distribution alone."""
