"""Configuration of an engine: options and environment variables."""

from .engine_config import (
    MIB,
    VLLM_VARIABLES,
    EngineConfig,
    LoraModule,
    MediaLimits,
    variable,
    variables_set,
)
from .plugin_options import ENV_PREFIX, PluginOptions

__all__ = [
    "ENV_PREFIX",
    "MIB",
    "VLLM_VARIABLES",
    "EngineConfig",
    "LoraModule",
    "MediaLimits",
    "PluginOptions",
    "variable",
    "variables_set",
]
