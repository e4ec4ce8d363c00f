"""The LiteLLM provider for `dashinfer_vlm/<model>`, in process or over HTTP.

    import dashinfer_vlm_litellm, litellm

    dashinfer_vlm_litellm.register()
    litellm.completion("dashinfer_vlm/demo", messages=[...])

For LiteLLM's proxy, set `custom_handler` to `dashinfer_vlm_litellm.handler`. To send requests with the same image to
the same server, add `dashinfer_vlm_litellm.media_affinity` to its `callbacks`.
"""

from __future__ import annotations

from dashinfer_vlm_core.errors import extra_required

with extra_required("The LiteLLM provider", extra="litellm"):
    from .affinity import MediaAffinity, media_affinity
    from .provider import PROVIDER, DashInferVLM, handler, register

__all__ = ["PROVIDER", "DashInferVLM", "MediaAffinity", "handler", "media_affinity", "register"]
