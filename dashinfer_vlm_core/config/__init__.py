"""What an engine is configured with: options, files that hold them, the environment."""

from .engine_config import MIB, VLLM_VARIABLES, EngineConfig, MediaLimits, option_fields, variable, variables_set
from .plugin_options import ENV_PREFIX, PluginOptions

__all__ = [
    "ENV_PREFIX",
    "MIB",
    "VLLM_VARIABLES",
    "EngineConfig",
    "MediaLimits",
    "PluginOptions",
    "option_fields",
    "variable",
    "variables_set",
]
