"""Offline inference with an interface like that of vLLM's `LLM`: a list of prompts in, their outputs in order."""

from ..protocol import LoRARequest
from .outputs import CompletionOutput, RequestOutput
from .params import SamplingParams, StructuredOutputsParams
from .vlm import VLM

__all__ = ["VLM", "CompletionOutput", "LoRARequest", "RequestOutput", "SamplingParams", "StructuredOutputsParams"]
