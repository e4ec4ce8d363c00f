"""Sampling -> DashInfer's generate_config: every value is checked, for the engine ignores, bends or dies of some."""

from __future__ import annotations

import secrets
from typing import Any

from ...errors import InvalidParameter, UnsupportedParameter
from ...models.spec import ModelSpec
from ...protocol.sampling import Sampling
from ..interface import DecodeRequest

SUPPORTED_ON_CPU = frozenset(
    {"temperature", "top_p", "top_k", "seed", "repetition_penalty", "stop_token_ids", "ignore_eos", "logprobs"}
)
SUPPORTED_ON_CUDA = SUPPORTED_ON_CPU | {"presence_penalty", "frequency_penalty"}
"""On a CPU the engine applies presence_penalty to the prompt as well, and frequency_penalty not at all."""

GREEDY_BELOW = 1e-5
"""As in the engine itself; dividing by less would leave the range of float32."""

WHOLE_ABOVE = 1 - 2e-6
"""The engine silently lowers a top_p within 1e-6 of 1 to 0.99, and takes 0 as the whole distribution."""

LEAST_TOP_P = 1e-6
"""Below 1e-7 the engine would take the whole distribution; no token's share is so small that this changes anything."""

REPETITION_PENALTIES = (0.01, 2.0)
MOST_LOGPROBS = 10
SEED_BITS = 32


def check_sampling(sampling: Sampling) -> None:
    """Refuse what the engine cannot do.

    Raises:
        InvalidParameter: a value outside of the engine's range.
        UnsupportedParameter: a combination that the engine computes differently.
    """
    least, most = REPETITION_PENALTIES
    if not least <= sampling.repetition_penalty <= most:
        raise InvalidParameter(f"repetition_penalty may be {least} to {most} here.", param="repetition_penalty")
    if sampling.logprobs is None:
        return
    if sampling.logprobs > MOST_LOGPROBS:
        raise InvalidParameter(f"top_logprobs may be up to {MOST_LOGPROBS} here.", param="top_logprobs")
    if sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty:
        raise UnsupportedParameter(
            "Log-probabilities are available here only without penalties: leave one of the two out.", param="logprobs"
        )


def stop_tokens(sampling: Sampling, spec: ModelSpec) -> frozenset[int]:
    """Tokens that end the answer."""
    return frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else spec.tokens.stop)


def generate_config(request: DecodeRequest, spec: ModelSpec) -> dict[str, Any]:
    """What the engine is asked for.

    Every token that ends the answer goes in as a stop word, so that all of them, and no others, do.
    """
    sampling = request.sampling
    assert sampling.max_tokens is not None
    return {
        **_choice(sampling, spec.vocab_size),
        "num_beams": 1,
        "num_return_sequences": 1,
        "do_sample": True,
        "seed": secrets.randbits(SEED_BITS) if sampling.seed is None else sampling.seed % (1 << SEED_BITS),
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "min_length": 0,
        "max_length": len(request.token_ids) + sampling.max_tokens,
        "early_stopping": False,
        "eos_token_id": spec.tokens.stop[0],
        "stop_words_ids": [[token] for token in sorted(stop_tokens(sampling, spec))],
        "logprobs": sampling.logprobs is not None,
        "top_logprobs": sampling.logprobs or 0,
    }


def _choice(sampling: Sampling, vocab_size: int) -> dict[str, Any]:
    """Temperature and truncation; a `top_k` above the vocabulary would corrupt the engine's memory."""
    if sampling.temperature < GREEDY_BELOW:
        return {"temperature": 1.0, "top_k": 1, "top_p": 0.0}
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k if sampling.top_k < vocab_size else 0,
        "top_p": 0.0 if sampling.top_p > WHOLE_ABOVE else max(sampling.top_p, LEAST_TOP_P),
    }
