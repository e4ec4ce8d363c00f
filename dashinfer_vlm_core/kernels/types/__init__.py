"""The interface of a kernel set, and the types that it refers to."""

from .batch import Additions, ForwardBatch, KVCacheLayer
from .interface import DecoderLayers, Int8CacheAttention, Kernels, SampledIds, StorableLayers, TokenSampling
from .layers import Attention, DecoderLayer, DecoderShape, Experts, Mlp, SharedExpert
from .linear import Activation, Linear, LMHead, Norm, StepCost, WeightBits
from .lora import LoraLayer, LoraLayers, LoraRows, LowRank, LowRankPart
from .recurrent import DeltaInputs, DeltaNet, RecurrentBatch, RecurrentStates, StateSpan, StateSpans
from .spans import KeyRanges, KVSpan, KVSpans

__all__ = [
    "Activation",
    "Additions",
    "Attention",
    "DecoderLayer",
    "DecoderLayers",
    "DecoderShape",
    "DeltaInputs",
    "DeltaNet",
    "Experts",
    "ForwardBatch",
    "Int8CacheAttention",
    "KVCacheLayer",
    "KVSpan",
    "KVSpans",
    "Kernels",
    "KeyRanges",
    "LMHead",
    "Linear",
    "LoraLayer",
    "LoraLayers",
    "LoraRows",
    "LowRank",
    "LowRankPart",
    "Mlp",
    "Norm",
    "RecurrentBatch",
    "RecurrentStates",
    "SampledIds",
    "SharedExpert",
    "StateSpan",
    "StateSpans",
    "StepCost",
    "StorableLayers",
    "TokenSampling",
    "WeightBits",
]
