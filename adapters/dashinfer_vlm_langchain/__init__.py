"""LangChain chat model for images and videos in chains and agents, in process or over HTTP.

Example:

    from dashinfer_vlm_langchain import ChatDashInferVLM

    ChatDashInferVLM(model="demo").invoke("Which shapes do you know?")
"""

from __future__ import annotations

from dashinfer_vlm_core.errors import extra_required

with extra_required("The LangChain chat model", extra="langchain"):
    from .chat import ChatDashInferVLM

__all__ = ["ChatDashInferVLM"]
