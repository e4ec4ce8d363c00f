"""What LiteLLM knows about a model before it asks: `get_model_info`, `supports_vision`, checks of the context size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import litellm

if TYPE_CHECKING:
    from dashinfer_vlm_core.engine import EngineStatus


def introduce(name: str, status: EngineStatus) -> None:
    """Tell LiteLLM about a model that has been loaded, unless it knows it already: the user may have said more."""
    if name not in litellm.model_cost:
        litellm.register_model({name: _info(name.partition("/")[0], status.max_model_len)})


def _info(provider: str, length: int) -> dict[str, object]:
    return {
        "litellm_provider": provider,
        "mode": "chat",
        "max_tokens": length,
        "max_input_tokens": length,
        "max_output_tokens": length,
        "input_cost_per_token": 0.0,
        "output_cost_per_token": 0.0,
        "cache_creation_input_token_cost": 0.0,
        "cache_read_input_token_cost": 0.0,
        "supports_vision": True,
        "supports_video_input": True,
        "supports_system_messages": True,
        "supports_native_streaming": True,
    }
