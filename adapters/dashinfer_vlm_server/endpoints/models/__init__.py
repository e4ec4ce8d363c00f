"""`GET /v1/models`: the model and its LoRA adapters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
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


class ModelList(BaseModel):
    """The served model, and its LoRA adapters."""

    object: str
    data: list[ServedModel]


def create_endpoints(server: ServerContext) -> Sequence[Endpoint]:
    models = _Models(server.engine)
    return [
        Endpoint("/v1/models", models.list, response=ModelList, errors=PLAIN_STATUSES),
        Endpoint("/v1/models/{name:path}", models.retrieve, response=ServedModel, errors=PLAIN_STATUSES),
    ]


@dataclass(frozen=True)
class _Models:
    engine: ChatEngine
    started: int = field(default_factory=lambda: int(time.time()))

    async def list(self) -> Response:
        return json_response(ModelList(object="list", data=self._models()))

    async def retrieve(self, name: str) -> Response:
        models = self._models()
        for model in models:
            if model.id == name:
                return json_response(model)
        raise ModelNotFound(f"The model {name!r} is not served here. Use {models[0].id!r}.", param="model")

    def _models(self) -> Sequence[ServedModel]:
        status = self.engine.status()
        shared: dict[str, Any] = {"object": "model", "created": self.started, "owned_by": "dashinfer-vlm"}
        return [
            ServedModel(id=status.model, root=status.model, parent=None, **shared),
            *(ServedModel(id=lora.name, root=lora.source, parent=status.model, **shared) for lora in status.loras),
        ]
