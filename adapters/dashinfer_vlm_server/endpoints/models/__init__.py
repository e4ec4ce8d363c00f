"""`GET /v1/models`: the model and its LoRA adapters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastapi.responses import Response
from openai.types import Model
from pydantic import BaseModel, Field

from dashinfer_vlm_core.errors import ModelNotFound

from ...endpoint import PLAIN_STATUSES, Endpoint, json_response

if TYPE_CHECKING:
    from dashinfer_vlm_core.engine import ChatEngine

    from ...server_context import ServerContext


class ServedModel(Model):
    """A model in OpenAI's format, with vLLM's fields for LoRA adapters."""

    root: str = Field(description="The model's name, or the folder's name or Hugging Face ID of an adapter.")
    parent: str | None = Field(description="The model that an adapter changes; null for the model itself.")
    description: str | None = Field(default=None, description="What the model can see and do; absent if unknown.")
    example_prompts: list[str] | None = Field(default=None, description="Prompts to try it with; absent if unknown.")
    generation_config: dict[str, float] | None = Field(
        default=None,
        description="Sampling parameters of the checkpoint's generation_config.json, which the chat page starts with."
        " Requests without them have OpenAI's defaults. Absent if there are none.",
    )


class ModelList(BaseModel):
    """The served model, and its LoRA adapters."""

    object: str
    data: list[ServedModel]


def create_endpoints(server: ServerContext) -> Sequence[Endpoint]:
    started = int(time.time())

    async def list_models() -> Response:
        return json_response(ModelList(object="list", data=_models(server.engine, started)))

    async def retrieve(name: str) -> Response:
        models = {model.id: model for model in _models(server.engine, started)}
        if name not in models:
            raise ModelNotFound(f"The model {name!r} is not served here. Use {next(iter(models))!r}.", param="model")
        return json_response(models[name])

    return [
        Endpoint("/v1/models", list_models, response=ModelList, errors=PLAIN_STATUSES),
        Endpoint("/v1/models/{name:path}", retrieve, response=ServedModel, errors=PLAIN_STATUSES),
    ]


def _models(engine: ChatEngine, started: int) -> list[ServedModel]:
    status = engine.status()
    shared: dict[str, Any] = {"object": "model", "created": started, "owned_by": "dashinfer-vlm"}
    card = {name: value for name, value in asdict(status.card).items() if value}
    return [
        ServedModel(id=status.model, root=status.model, parent=None, **shared, **card),
        *(ServedModel(id=lora.name, root=lora.source, parent=status.model, **shared) for lora in status.loras),
    ]
