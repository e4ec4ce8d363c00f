"""The client of a request, as the interface that received it knows it. It travels in a context variable, like the
request's id."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Client:
    """Who sent a request.

    Attributes:
        id: a digest of the API key; empty for callers without one. Media workers are shared fairly among ids.
        cache_namespace: joined with the request's `cache_salt`, so that clients with different namespaces share no
            cached media, embeddings or prefixes; empty for the common namespace.
    """

    id: str = ""
    cache_namespace: str = ""


NO_CLIENT: Client = Client()
current_client: ContextVar[Client] = ContextVar("dashinfer_vlm_client", default=NO_CLIENT)
