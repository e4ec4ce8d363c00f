"""`GET /v1/models`: the models and their LoRA adapters. `POST /v1/models/load` and `/unload`, for operators."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.responses import Response
from openai.types import Model
from pydantic import BaseModel, Field

from dashinfer_vlm_core.errors import ModelNotFound
from dashinfer_vlm_core.protocol.body import ModelRequest

from ...endpoint import PLAIN_STATUSES, Endpoint, json_response, post

if TYPE_CHECKING:
    from dashinfer_vlm_core.engine import ChatEngine

    from ...server_context import ServerContext


class ServedModel(Model):
    """A model in OpenAI's format, with vLLM's fields for LoRA adapters."""

    root: str = Field(description="The model's name, or the folder's name or Hugging Face ID of an adapter.")
    parent: str | None = Field(description="The model that an adapter changes; null for the model itself.")
    state: str | None = Field(
        default=None,
        description="The state of a managed model: unloaded, loading, ready, restarting, unloading or failed.",
    )
    max_model_len: int | None = Field(
        default=None, description="The maximum number of tokens of prompt and completion; null if it is not loaded."
    )
    description: str | None = Field(default=None, description="What the model can see and do; absent if unknown.")
    example_prompts: list[str] | None = Field(default=None, description="Prompts to try it with; absent if unknown.")
    generation_config: dict[str, float] | None = Field(
        default=None,
        description="Sampling parameters of the checkpoint's generation_config.json, which the chat page starts with."
        " Requests without them have OpenAI's defaults. Absent if there are none.",
    )


class ModelList(BaseModel):
    """The served models, their aliases and their LoRA adapters."""

    object: str
    data: list[ServedModel]


def create_endpoints(server: ServerContext) -> Sequence[Endpoint]:
    started = int(time.time())

    async def list_models() -> Response:
        return json_response(ModelList(object="list", data=list(_models(server.engine, started))))

    async def retrieve(name: str) -> Response:
        models = {model.id: model for model in _models(server.engine, started)}
        if name not in models:
            raise ModelNotFound.among(models, name)
        return json_response(models[name])

    async def load(request: Request) -> Response:
        """Load a model, and return it when it is ready."""
        server.check_admin(request)
        model = (await server.read(request, ModelRequest.parse)).model
        await server.run(request, server.engine.aload(model))
        return await retrieve(server.engine.for_model(model).status().model)

    async def unload(request: Request) -> Response:
        """Unload a model when its running requests have ended; return it before that."""
        server.check_admin(request)
        model = (await server.read(request, ModelRequest.parse)).model
        await server.engine.aunload(model)
        return await retrieve(server.engine.for_model(model).status().model)

    manage = partial(post, body=[ModelRequest], response=ServedModel)
    return [
        Endpoint("/v1/models", list_models, response=ModelList, errors=PLAIN_STATUSES),
        manage("/v1/models/load", load),
        manage("/v1/models/unload", unload),
        Endpoint("/v1/models/{name:path}", retrieve, response=ServedModel, errors=PLAIN_STATUSES),
    ]


def _models(engine: ChatEngine, started: int) -> Iterator[ServedModel]:
    shared: dict[str, Any] = {"object": "model", "created": started, "owned_by": "dashinfer-vlm"}
    for status in (model.status() for model in engine.models()):
        card = {name: value for name, value in asdict(status.card).items() if value}
        own: dict[str, Any] = {**shared, "max_model_len": status.max_model_len or None}
        if engine.manages_models:
            own["state"] = status.state
        yield ServedModel(id=status.model, root=status.model, parent=None, **own, **card)
        for alias in status.aliases:
            yield ServedModel(id=alias, root=status.model, parent=None, **own, **card)
        for lora in status.loras:
            yield ServedModel(id=lora.name, root=lora.source, parent=status.model, **own)
