"""Ollama's API: chat, generate, embeddings, and what is known about models."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING

from fastapi.responses import PlainTextResponse, Response

from dashinfer_vlm_core.protocol.ollama import OllamaChatRequest, OllamaGenerateRequest
from dashinfer_vlm_core.protocol.ollama_models import OllamaEmbeddingsRequest, OllamaEmbedRequest, OllamaModelRequest

from ...endpoint import ENGINE_STATUSES, PLAIN_STATUSES, Endpoint, Responses
from .completions import Completions
from .embeddings import Embeddings
from .errors import error_body
from .models import Models

if TYPE_CHECKING:
    from ...server_context import ServerContext

PROTOCOL = "ollama"

_SCHEMA = {"schema": {"type": "object"}}
_OBJECT: Responses = {200: {"description": "A response", "content": {"application/json": _SCHEMA}}}
_STREAM: Responses = {
    200: {
        "description": "A response, or a stream of its parts, each a line",
        "content": {"application/json": _SCHEMA, "application/x-ndjson": {}},
    }
}


def create_endpoints(server: ServerContext) -> Sequence[Endpoint]:
    models = Models(server, started=datetime.now(timezone.utc))
    completions = Completions(server, models)
    embeddings = Embeddings(server, models)
    get = partial(Endpoint, errors=PLAIN_STATUSES, error_body=error_body, responses=_OBJECT)
    post = partial(Endpoint, method="POST", errors=ENGINE_STATUSES, error_body=error_body, responses=_OBJECT)
    generate = partial(post, responses=_STREAM, generates=True)
    refused = partial(Endpoint, errors=(400, *PLAIN_STATUSES), error_body=error_body)
    return [
        generate("/api/chat", completions.chat, body=[OllamaChatRequest]),
        generate("/api/generate", completions.generate, body=[OllamaGenerateRequest]),
        post("/api/embed", embeddings.embed, body=[OllamaEmbedRequest], generates=True),
        post("/api/embeddings", embeddings.embed_prompt, body=[OllamaEmbeddingsRequest], generates=True),
        get("/api/tags", models.list_all),
        get("/api/ps", models.list_loaded),
        get("/api/version", models.version),
        post("/api/show", models.show, body=[OllamaModelRequest]),
        post("/api/pull", models.pull, body=[OllamaModelRequest], responses=_STREAM),
        refused("/api/delete", models.refuse, method="DELETE"),
        *(refused(f"/api/{name}", models.refuse, method="POST") for name in ("copy", "create", "push")),
        *([] if server.settings.page else [get("/", _is_running, include_in_schema=False)]),
    ]


async def _is_running() -> Response:
    """Respond to programs that find out whether a server is Ollama's."""
    return PlainTextResponse("Ollama is running")
