"""The interface of decoders, and the supervisor that restarts them."""

from .interface import (
    GUIDED_DECODING,
    LORA,
    SAMPLING_PARAMETERS,
    Decoder,
    DecodeRequest,
    DecoderFactory,
    DecoderStats,
    DecoderSupport,
    FinishReason,
    GrammarMatcher,
    Sampling,
    Token,
    VisualSpan,
    check_request,
)

__all__ = [
    "GUIDED_DECODING",
    "LORA",
    "SAMPLING_PARAMETERS",
    "DecodeRequest",
    "Decoder",
    "DecoderFactory",
    "DecoderStats",
    "DecoderSupport",
    "FinishReason",
    "GrammarMatcher",
    "Sampling",
    "Token",
    "VisualSpan",
    "check_request",
]
