"""Decoders: their contract, and what replaces one that has died."""

from .interface import (
    GUIDED_DECODING,
    SAMPLING_PARAMETERS,
    CompiledGrammar,
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
    "SAMPLING_PARAMETERS",
    "CompiledGrammar",
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
