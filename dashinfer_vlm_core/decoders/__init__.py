"""The interface of decoders, and the supervisor that restarts them."""

from ..protocol.sampling import SAMPLING_PARAMETERS, Sampling
from .interface import (
    GUIDED_DECODING,
    LORA,
    Decoder,
    DecodeRequest,
    DecoderFactory,
    DecoderStats,
    DecoderSupport,
    FinishReason,
    GrammarMatcher,
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
