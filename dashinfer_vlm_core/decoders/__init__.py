"""The interface of decoders, and the supervisor that restarts them."""

from ..protocol.sampling import SAMPLING_PARAMETERS, Sampling
from .interface import (
    DRAFT_MODEL,
    GUIDED_DECODING,
    LORA,
    POOLING,
    PREFIX_CACHE,
    Decoder,
    DecodeRequest,
    DecoderFactory,
    DecoderStats,
    DecoderSupport,
    FinishReason,
    GrammarMatcher,
    Pooled,
    Token,
    VisualSpan,
    check_request,
)

__all__ = [
    "DRAFT_MODEL",
    "GUIDED_DECODING",
    "LORA",
    "POOLING",
    "PREFIX_CACHE",
    "SAMPLING_PARAMETERS",
    "DecodeRequest",
    "Decoder",
    "DecoderFactory",
    "DecoderStats",
    "DecoderSupport",
    "FinishReason",
    "GrammarMatcher",
    "Pooled",
    "Sampling",
    "Token",
    "VisualSpan",
    "check_request",
]
