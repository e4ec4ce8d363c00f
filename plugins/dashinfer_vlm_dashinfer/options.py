"""Translate Sampling to DashInfer's generate_config. Every value is checked, since DashInfer ignores some invalid
values, changes others, and crashes on the rest."""

from __future__ import annotations

import secrets
from typing import Any

from dashinfer_vlm_core.decoders.interface import DecodeRequest
from dashinfer_vlm_core.errors import InvalidParameter, UnsupportedParameter
from dashinfer_vlm_core.models.spec import ModelSpec
from dashinfer_vlm_core.protocol.sampling import GREEDY_BELOW, Sampling

SUPPORTED_ON_CPU = frozenset(
    {"temperature", "top_p", "top_k", "seed", "repetition_penalty", "stop_token_ids", "ignore_eos", "logprobs"}
)
SUPPORTED_ON_CUDA = SUPPORTED_ON_CPU | {"presence_penalty", "frequency_penalty"}
"""On a CPU DashInfer applies presence_penalty to the prompt as well, and frequency_penalty not at all."""

TOP_P_DISABLED_ABOVE = 1 - 2e-6
"""DashInfer silently lowers a top_p within 1e-6 of 1 to 0.99, and treats 0 as the whole distribution."""

MIN_TOP_P = 1e-6
"""Below 1e-7 DashInfer would use the whole distribution. No token's probability is so small that this limit changes
the result."""

REPETITION_PENALTY_RANGE = (0.01, 2.0)
MAX_LOGPROBS = 10
SEED_BITS = 32


def check_sampling(sampling: Sampling) -> None:
    """Check that DashInfer supports the sampling parameters.

    Raises:
        InvalidParameter: a value is outside DashInfer's range.
        UnsupportedParameter: DashInfer computes a combination of parameters differently.
    """
    minimum, maximum = REPETITION_PENALTY_RANGE
    if not minimum <= sampling.repetition_penalty <= maximum:
        message = (
            f"repetition_penalty must be {minimum} to {maximum} with DashInfer, got {sampling.repetition_penalty}."
        )
        raise InvalidParameter(message, param="repetition_penalty")
    if sampling.logprobs is None:
        return
    if sampling.logprobs > MAX_LOGPROBS:
        message = f"top_logprobs must be at most {MAX_LOGPROBS} with DashInfer, got {sampling.logprobs}."
        raise InvalidParameter(message, param="top_logprobs")
    if sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty:
        raise UnsupportedParameter(
            "DashInfer returns log-probabilities only without penalties. Remove one of the two.", param="logprobs"
        )


def stop_tokens(sampling: Sampling, spec: ModelSpec) -> frozenset[int]:
    """Tokens that end the output."""
    return frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else spec.tokens.stop)


def generate_config(request: DecodeRequest, spec: ModelSpec) -> dict[str, Any]:
    """Create DashInfer's options for a request.

    Every token that ends the output is passed as a stop word, so that exactly these tokens end it.
    """
    sampling = request.sampling
    assert sampling.max_tokens is not None
    return {
        **_sampling_config(sampling, spec.vocab_size),
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


def _sampling_config(sampling: Sampling, vocab_size: int) -> dict[str, Any]:
    # A `top_k` above the vocabulary would corrupt DashInfer's memory.
    if sampling.temperature < GREEDY_BELOW:
        return {"temperature": 1.0, "top_k": 1, "top_p": 0.0}
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k if sampling.top_k < vocab_size else 0,
        "top_p": 0.0 if sampling.top_p > TOP_P_DISABLED_ABOVE else max(sampling.top_p, MIN_TOP_P),
    }
