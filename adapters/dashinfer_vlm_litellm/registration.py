"""Makes LiteLLM know the provider."""

from __future__ import annotations

import litellm
from litellm.types.llms.custom_llm import CustomLLMItem
from litellm.utils import custom_llm_setup

from .model_info import register_known_models
from .provider import PROVIDER, DashInferVLM

handler: DashInferVLM = DashInferVLM()
"""The provider's instance in this process; its engines are started on first use."""


def register() -> DashInferVLM:
    """Make `dashinfer_vlm/<model>` a model of LiteLLM in this process; calling it again changes nothing.

    Call it before a `Router` is made: that one looks at its models at once.
    """
    others = [item for item in litellm.custom_provider_map if item["provider"] != PROVIDER]
    # A new list: LiteLLM, or the proxy, may hold the old one.
    litellm.custom_provider_map = [*others, CustomLLMItem(provider=PROVIDER, custom_handler=handler)]
    custom_llm_setup()  # type: ignore[no-untyped-call]  # LiteLLM has no annotations there
    register_known_models(PROVIDER)
    return handler
