"""Registration of the provider with LiteLLM."""

from __future__ import annotations

import litellm
from litellm.types.llms.custom_llm import CustomLLMItem
from litellm.utils import custom_llm_setup

from .model_info import register_known_models
from .provider import PROVIDER, DashInferVLM

handler: DashInferVLM = DashInferVLM()
"""The provider of this process. Engines are started on first use."""


def register() -> DashInferVLM:
    """Register the provider for `dashinfer_vlm/<model>` in this process. Repeated calls have no effect.

    Call it before creating a `Router`, which validates its models on creation.
    """
    others = [item for item in litellm.custom_provider_map if item["provider"] != PROVIDER]
    # Create a new list, because LiteLLM or the proxy may hold a reference to the old one.
    litellm.custom_provider_map = [*others, CustomLLMItem(provider=PROVIDER, custom_handler=handler)]
    custom_llm_setup()  # type: ignore[no-untyped-call]  # LiteLLM has no annotations there
    register_known_models(PROVIDER)
    return handler
