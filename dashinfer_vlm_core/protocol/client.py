"""The client of a request, as identified by the interface that received it. A context variable holds it, like the
request's id."""

from __future__ import annotations

import hashlib
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Client:
    """Who sent a request.

    Attributes:
        id: a digest of the API key; empty for callers without one. Fetches, media workers and the memory
            of bodies are shared fairly among ids.
        cache_namespace: joined with the request's `cache_salt`, so that clients with different namespaces share no
            cached media, embeddings or prefixes; empty for the common namespace.
        media_workers: maximum number of media workers that the client can occupy; None for the engine's default.
    """

    id: str = ""
    cache_namespace: str = ""
    media_workers: int | None = None

    def effective_cache_salt(self, cache_salt: str | None) -> str | None:
        """Join the namespace with a request's `cache_salt`; without a namespace, return `cache_salt` unchanged.

        The result is a digest of both, where the length of the namespace separates them. It is a valid `cache_salt`.
        """
        if not self.cache_namespace:
            return cache_salt
        joined = f"{len(self.cache_namespace)}:{self.cache_namespace}{cache_salt or ''}"
        return hashlib.sha256(joined.encode()).hexdigest()


NO_CLIENT: Client = Client()
current_client: ContextVar[Client] = ContextVar("dashinfer_vlm_client", default=NO_CLIENT)
