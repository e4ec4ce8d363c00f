"""Decoders: their contract, and what replaces one that has died."""

from .interface import (
    GUIDE,
    SAMPLING_PARAMETERS,
    Decoder,
    DecodeRequest,
    DecoderFactory,
    DecoderStats,
    FinishReason,
    Fitness,
    Guide,
    Sampling,
    Token,
    VisualSpan,
    Walk,
    check_request,
)

__all__ = [
    "GUIDE",
    "SAMPLING_PARAMETERS",
    "DecodeRequest",
    "Decoder",
    "DecoderFactory",
    "DecoderStats",
    "FinishReason",
    "Fitness",
    "Guide",
    "Sampling",
    "Token",
    "VisualSpan",
    "Walk",
    "check_request",
]
