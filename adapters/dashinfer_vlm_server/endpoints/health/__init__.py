"""`GET /health` and `GET /health/ready`: the status of the server, for process supervisors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi.responses import Response
from pydantic import BaseModel, Field

from ...endpoint import Endpoint, Responses, json_response
from ...errors import RETRY_AFTER_SECONDS

if TYPE_CHECKING:
    from dashinfer_vlm_core.engine import ChatEngine

    from ...server_context import ServerContext


class Health(BaseModel):
    """The status of the server and its engine."""

    status: str
    model: str = Field(description="The name of the model; of several, of the first one, as the following fields.")
    decoder: str | None = Field(default=None, description="The decoder; absent while the model is not loaded.")
    decoder_reason: str | None = Field(default=None, description="Why it was selected; absent like `decoder`.")
    max_model_len: int | None = Field(
        default=None, description="Maximum number of tokens of prompt and completion; absent like `decoder`."
    )
    supports_reasoning: bool | None = Field(
        default=None, description="Whether the model can reason before it responds; absent if unknown."
    )
    task: str | None = Field(
        default=None, description="What the model is used for: generate, embed or score; absent if unknown."
    )
    fatal_error: str | None = Field(default=None, description="Why the engine failed; absent unless it did.")
    models: dict[str, str] | None = Field(
        default=None, description="The state of each model by its name; absent if models are not managed."
    )


def create_endpoints(server: ServerContext) -> Sequence[Endpoint]:
    async def health() -> Response:
        """Report the status. Returns 200 while the process serves, even if its engine failed."""
        return json_response(_health(server))

    async def ready() -> Response:
        """Report whether requests are served: 200 if they are, otherwise 503."""
        health = _health(server)
        if health.status == "ready":
            return json_response(health)
        return json_response(health, status=503, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})

    unready: Responses = {503: {"model": Health, "description": "Requests cannot be served now"}}
    probe = partial(Endpoint, response=Health, public=True, any_host=True, quiet=True)
    return [probe("/health", health), probe("/health/ready", ready, responses=unready)]


def _health(server: ServerContext) -> Health:
    status = server.engine.status()
    given: dict[str, Any] = {
        "decoder": status.decoder or None,
        "decoder_reason": status.decoder_reason or None,
        "max_model_len": status.max_model_len or None,
        "supports_reasoning": status.supports_reasoning,
        "task": status.task,
        "fatal_error": status.fatal_error or None,
        "models": _states(server.engine) if server.engine.manages_models else None,
    }
    return Health(
        status="draining" if server.drain_state.draining else status.state,
        model=status.model,
        **{name: value for name, value in given.items() if value is not None},
    )


def _states(engine: ChatEngine) -> dict[str, str]:
    return {status.model: status.state for status in (model.status() for model in engine.models())}
