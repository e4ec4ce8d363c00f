"""What an engine is configured with: options, files that hold them, the environment."""

from .engine_config import ENV_PREFIX, MIB, VLLM_VARIABLES, EngineConfig, MediaLimits, variable, variables_set

__all__ = [
    "ENV_PREFIX",
    "MIB",
    "VLLM_VARIABLES",
    "EngineConfig",
    "MediaLimits",
    "variable",
    "variables_set",
]
