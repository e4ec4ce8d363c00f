"""The LiteLLM provider: `dashinfer_vlm/<model>` in every call of LiteLLM, in process or over HTTP.

    import dashinfer_vlm_litellm, litellm

    dashinfer_vlm_litellm.register()
    litellm.completion("dashinfer_vlm/demo", messages=[...])

LiteLLM's proxy takes `dashinfer_vlm_litellm.handler` as `custom_handler`.
"""

from __future__ import annotations

from .provider import PROVIDER, DashInferVLM
from .registration import handler, register

__all__ = ["PROVIDER", "DashInferVLM", "handler", "register"]
