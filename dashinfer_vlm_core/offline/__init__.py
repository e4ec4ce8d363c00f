"""A model in this process, for people who know vLLM's `LLM`: many prompts in, their answers out, in order."""

from .outputs import CompletionOutput, RequestOutput
from .params import SamplingParams
from .vlm import VLM

__all__ = ["VLM", "CompletionOutput", "RequestOutput", "SamplingParams"]
