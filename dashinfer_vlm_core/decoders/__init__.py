"""Decoders: their contract, and what replaces one that has died."""

from .interface import (
    GUIDED_DECODING,
    SAMPLING_PARAMETERS,
    Decoder,
    DecodeRequest,
    DecoderFactory,
    DecoderStats,
    FinishReason,
    DecoderSupport,
    CompiledGrammar,
    Sampling,
    Token,
    VisualSpan,
    GrammarMatcher,
    check_request,
)

__all__ = [
    "GUIDED_DECODING",
    "SAMPLING_PARAMETERS",
    "DecodeRequest",
    "Decoder",
    "DecoderFactory",
    "DecoderStats",
    "FinishReason",
    "DecoderSupport",
    "CompiledGrammar",
    "Sampling",
    "Token",
    "VisualSpan",
    "GrammarMatcher",
    "check_request",
]
