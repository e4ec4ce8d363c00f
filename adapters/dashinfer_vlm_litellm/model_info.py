"""Model information for LiteLLM's `get_model_info`, `supports_vision` and the like, and context window checks."""

from __future__ import annotations

import logging

import litellm

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.engine.capabilities import Capabilities, configured_capabilities
from dashinfer_vlm_core.errors import SetupError
from dashinfer_vlm_core.models.pooling import Task
from dashinfer_vlm_core.plugins import load_plugins

logger: logging.Logger = logging.getLogger(__name__)

_registered: dict[str, dict[str, object]] = {}
"""What was registered here, by model name."""


def register_model_info(name: str, capabilities: Capabilities, *, task: Task | None = "generate") -> None:
    """Register a model with LiteLLM. Values that the user has registered stay as they are.

    LiteLLM's Router registers each of its models as well, before it is loaded and mostly without values.

    Args:
        name: the model's name with the provider prefix.
        capabilities: what the model and its decoder support.
        task: what the engine is used for. A model that was registered for text stays so if it is also used for
            embeddings.
    """
    ours = _registered.get(name, {})
    if task == "embed" and ours.get("mode") == "chat":
        return
    info = (_embedding_info if task == "embed" else _info)(name.partition("/")[0], capabilities)
    existing = litellm.model_cost.get(name, {})
    theirs = {key for key, value in existing.items() if value is not None and value != ours.get(key)}
    missing = {key: value for key, value in info.items() if key not in theirs and existing.get(key) != value}
    _registered[name] = info
    if missing:
        litellm.register_model({name: missing})


def register_known_models(provider: str) -> None:
    """Register the models of plugins, such as the bundled `demo`, without loading them."""
    for name in load_plugins().models:
        if capabilities := _capabilities(name):
            register_model_info(f"{provider}/{name}", capabilities)


def _capabilities(model: str) -> Capabilities | None:
    try:
        return configured_capabilities(EngineConfig(model=model))
    except SetupError as error:
        logger.warning("A model was not registered with LiteLLM: %s", error.message)
        return None


def _info(provider: str, capabilities: Capabilities) -> dict[str, object]:
    profile = capabilities.profile
    return {
        **_common_info(provider, capabilities),
        "mode": "chat",
        "max_output_tokens": capabilities.max_model_len,
        "supports_function_calling": profile.tools,
        "supports_parallel_function_calling": profile.tools,
        "supports_tool_choice": capabilities.tool_choice,
        "supports_response_schema": capabilities.guided_decoding,
        "supports_reasoning": profile.reasoning,
        "supports_system_messages": True,
        "supports_native_streaming": True,
        "supports_pdf_input": profile.images,
        **dict.fromkeys(("supports_audio_input", "supports_audio_output"), False),
    }


def _embedding_info(provider: str, capabilities: Capabilities) -> dict[str, object]:
    return {
        **_common_info(provider, capabilities),
        "mode": "embedding",
        "supports_embedding_image_input": capabilities.profile.images,
    }


def _common_info(provider: str, capabilities: Capabilities) -> dict[str, object]:
    costs = ("input_cost_per_token", "output_cost_per_token")
    cache_costs = ("cache_creation_input_token_cost", "cache_read_input_token_cost")
    return {
        "litellm_provider": provider,
        **dict.fromkeys(("max_tokens", "max_input_tokens"), capabilities.max_model_len),
        **dict.fromkeys((*costs, *cache_costs), 0.0),
        "supports_vision": capabilities.profile.images,
        "supports_video_input": capabilities.profile.videos,
    }
