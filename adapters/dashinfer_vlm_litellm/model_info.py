"""What LiteLLM knows about a model before it asks: `get_model_info`, `supports_vision`, checks of the context size."""

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

_reported: dict[str, tuple[int, Profile]] = {}
"""What LiteLLM knows from here: context size and profile, by name."""


def register_model_info(name: str, length: int, profile: Profile | None = None) -> None:
    """Tell LiteLLM about a model, unless its user has done so.

    Args:
        name: with the provider in front.
        length: tokens that prompt and answer may have together.
        profile: what the model can do; by default what was reported before, or else all of it.
    """
    known = _reported.get(name)
    profile = profile or (known[1] if known else Profile())
    if known != (length, profile) and (known or name not in litellm.model_cost):
        _reported[name] = (length, profile)
        litellm.register_model({name: _info(name.partition("/")[0], length, profile)})


def register_known_models(provider: str) -> None:
    """Tell LiteLLM about the models that plugins bring, such as the bundled `demo`, without loading them."""
    registry = load_plugins()
    for name, folder in registry.models.items():
        if spec := _spec(registry, folder):
            register_model_info(f"{provider}/{name}", spec.max_model_len, spec.profile)


def _spec(registry: Registry, folder: Path) -> ModelSpec | None:
    """What a checkpoint says about itself; None if it cannot be read."""
    try:
        return registry.family_of(folder).load_spec(folder)
    except SetupError as error:
        logger.warning("LiteLLM is not told about a model: %s", error.message)
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
