"""LangChain models for images and videos, in process or over HTTP: a chat model, embeddings, and a reranker.

Example:

    from dashinfer_vlm_langchain import ChatDashInferVLM

    ChatDashInferVLM(model="demo").invoke("Which shapes do you know?")
"""

from __future__ import annotations

from dashinfer_vlm_core.errors import extra_required

with extra_required("LangChain support", extra="langchain"):
    from .chat import ChatDashInferVLM
    from .embeddings import DashInferVLMEmbeddings
    from .reranker import DashInferVLMReranker

__all__ = ["ChatDashInferVLM", "DashInferVLMEmbeddings", "DashInferVLMReranker"]
