"""Sampling parameters of a completion, shared by all adapters and decoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from ..errors import InvalidParameter

GREEDY_BELOW = 1e-5
"""Temperatures below this count as 0, as in vLLM and DashInfer: they select the same token, but overflow float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Validated sampling parameters of a completion: finite, and in the ranges stated here.

    Created by `ChatRequest.sampling`. Decoders can rely on these ranges.

    Attributes:
        max_tokens: maximum number of completion tokens, at least 1; None means the rest of the context.
        min_tokens: minimum number of tokens before a token can end the completion.
        temperature: 0 (greedy) to 2.
        top_p: above 0, up to 1; 1 keeps the whole distribution.
        top_k: 0 keeps the whole distribution, otherwise only the k most likely tokens are kept.
        min_p: 0 to 1; tokens whose probability is below that of the most likely token times `min_p` are left out,
            before `top_k` and `top_p`; 0 keeps the whole distribution.
        seed: the same seed and request give the same completion; None selects a random seed.
        repetition_penalty: above 0; positive logits of tokens in prompt and completion are divided by it, negative ones
            multiplied; 1 disables it.
        presence_penalty: -2 to 2, subtracted once from the logits of tokens in the completion.
        frequency_penalty: -2 to 2, subtracted per occurrence of a token in the completion.
        no_repeat_ngram_size: tokens that would complete an n-gram of this size that is in the completion already are
            not sampled, unless a grammar allows no others; 0 allows all.
        no_repeat_ngram_window: of how many of the last tokens of the completion such an n-gram can begin with one; None
            means all.
        no_repeat_ngram_whitelist: token IDs that may complete it.
        logit_bias: token ID -> bias of -100 to 100, added to its logit.
        stop_token_ids: token IDs that end the completion, in addition to the model's own.
        ignore_eos: continue after the model's own end token.
        logprobs: number of alternatives (0 to 20) to return for each sampled token; None disables log probabilities.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    no_repeat_ngram_window: int | None = None
    no_repeat_ngram_whitelist: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)

    def seeded(self, index: int) -> Sampling:
        """Return the parameters of choice `index` of a request: its seed is the first choice's plus `index`."""
        return self if self.seed is None else replace(self, seed=(self.seed + index + 2**63) % 2**64 - 2**63)

    def check_token_ids(self, vocab_size: int) -> None:
        """Check that the tokens of `logit_bias` and `stop_token_ids` exist.

        Raises:
            InvalidParameter: one does not; `param` names the option.
        """
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            if (unknown := next((token for token in ids if not 0 <= token < vocab_size), None)) is not None:
                raise InvalidParameter(
                    f"`{name}` contains token id {unknown}. Token ids must be 0 to {vocab_size - 1}.", param=name
                )

    def requested_params(self) -> frozenset[str]:
        """Return the parameters that differ from `NEUTRAL`. A decoder must support all of them to serve the request."""
        return frozenset(name for name in SAMPLING_PARAMETERS if getattr(self, name) != getattr(NEUTRAL, name))


SAMPLING_PARAMETERS = frozenset(item.name for item in fields(Sampling)) - {"max_tokens"}
"""The parameters that a decoder may not support; every decoder supports `max_tokens`."""

NEUTRAL = Sampling()
"""The parameters that do not change the model's distribution."""
