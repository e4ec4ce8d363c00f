"""Model information for LiteLLM's `get_model_info`, `supports_vision` and context window checks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import litellm

from dashinfer_vlm_core.errors import SetupError
from dashinfer_vlm_core.models.spec import Profile
from dashinfer_vlm_core.plugins import load_plugins

if TYPE_CHECKING:
    from pathlib import Path

    from dashinfer_vlm_core.models.spec import ModelSpec
    from dashinfer_vlm_core.plugins import Registry

logger: logging.Logger = logging.getLogger(__name__)

_registered: dict[str, tuple[int, Profile]] = {}
"""Context length and profile that were registered here, by model name."""


def register_model_info(name: str, length: int, profile: Profile | None = None) -> None:
    """Register a model with LiteLLM, unless the user has registered it.

    Args:
        name: the model's name with the provider prefix.
        length: maximum number of prompt and completion tokens.
        profile: the model's capabilities; by default those of an earlier registration, or else all of them.
    """
    known = _registered.get(name)
    profile = profile or (known[1] if known else Profile())
    if known != (length, profile) and (known or name not in litellm.model_cost):
        _registered[name] = (length, profile)
        litellm.register_model({name: _info(name.partition("/")[0], length, profile)})


def register_known_models(provider: str) -> None:
    """Register the models of plugins, such as the bundled `demo`, without loading them."""
    registry = load_plugins()
    for name, folder in registry.models.items():
        if spec := _spec(registry, folder):
            register_model_info(f"{provider}/{name}", spec.max_model_len, spec.profile)


def _spec(registry: Registry, folder: Path) -> ModelSpec | None:
    """Return the specification of a checkpoint; None if it cannot be read."""
    try:
        return registry.load_spec(folder)
    except SetupError as error:
        logger.warning("A model was not registered with LiteLLM: %s", error.message)
        return None


def _info(provider: str, length: int, profile: Profile) -> dict[str, object]:
    costs = ("input_cost_per_token", "output_cost_per_token")
    cache_costs = ("cache_creation_input_token_cost", "cache_read_input_token_cost")
    return {
        "litellm_provider": provider,
        "mode": "chat",
        **dict.fromkeys(("max_tokens", "max_input_tokens", "max_output_tokens"), length),
        **dict.fromkeys((*costs, *cache_costs), 0.0),
        "supports_vision": profile.images,
        "supports_video_input": profile.videos,
        "supports_system_messages": True,
        "supports_native_streaming": True,
    }
