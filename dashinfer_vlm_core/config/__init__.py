"""Configuration of an engine: options and environment variables."""

from .engine_config import MIB, EngineConfig, LoraModule, MediaLimits
from .limits import Limits
from .options import ENV_PREFIX, VLLM_VARIABLES, PluginOptions, variable, variables_set

__all__ = [
    "ENV_PREFIX",
    "MIB",
    "VLLM_VARIABLES",
    "EngineConfig",
    "Limits",
    "LoraModule",
    "MediaLimits",
    "PluginOptions",
    "variable",
    "variables_set",
]
