"""`POST /api/embed`, and `POST /api/embeddings`, which Ollama replaced by it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.responses import Response
from pydantic_core import to_json

from dashinfer_vlm_core.protocol.ollama_models import OllamaEmbeddingBody, OllamaEmbeddingsRequest, OllamaEmbedRequest

from .models import Models

if TYPE_CHECKING:
    from dashinfer_vlm_core.engine import PoolingResult
    from dashinfer_vlm_core.protocol import EmbeddingRequest

    from ...server_context import ServerContext


@dataclass(frozen=True)
class Embeddings:
    """Embeddings of texts.

    Attributes:
        server: what the endpoints share.
        models: the models.
    """

    server: ServerContext
    models: Models

    async def embed(self, request: Request) -> Response:
        """Compute the embeddings of texts; without texts, load the model."""
        start = time.perf_counter_ns()
        parsed = await self.server.read(request, OllamaEmbedRequest.parse)
        load, result = await self._run(request, parsed)
        fields: dict[str, Any] = {"model": parsed.model}
        if result:
            fields |= {"load_duration": load, "prompt_eval_count": sum(result.prompt_tokens)}
            fields["total_duration"] = time.perf_counter_ns() - start
        return await _response(result, fields)

    async def embed_prompt(self, request: Request) -> Response:
        """Compute the embedding of a text; without it, load the model."""
        parsed = await self.server.read(request, OllamaEmbeddingsRequest.parse)
        _, result = await self._run(request, parsed)
        vector = result.values[0].tolist() if result else []
        return Response(to_json({"embedding": vector}), media_type="application/json")

    async def _run(self, request: Request, parsed: OllamaEmbeddingBody) -> tuple[int, PoolingResult | None]:
        """Return how many nanoseconds it took to load the model, and the embeddings; None if there are no texts."""
        if parsed.unloads:
            self.models.check_unload(request)
        model = self.models.resolve(parsed.model)
        embedding = parsed.to_embedding(model) if parsed.texts else None
        try:
            with parsed.renamed_errors():
                return await self.server.run(request, self._embed(model, embedding))
        finally:
            if parsed.unloads:
                await self.server.engine.aunload(model)

    async def _embed(self, model: str, embedding: EmbeddingRequest | None) -> tuple[int, PoolingResult | None]:
        if embedding is None:
            self.models.status(model)
            return await self.models.load(model), None
        load = await self.models.load(model)
        return load, await self.server.engine.aembed(embedding)


async def _response(result: PoolingResult | None, fields: dict[str, Any]) -> Response:
    def serialize() -> bytes:
        return to_json({**fields, "embeddings": result.values.tolist() if result else []})

    # In a thread: thousands of embeddings are many megabytes.
    return Response(await asyncio.to_thread(serialize), media_type="application/json")
