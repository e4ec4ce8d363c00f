"""The models in the form of Ollama's API: which are served and loaded, and what they support."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pydantic_core
from fastapi import Request
from fastapi.responses import JSONResponse, Response

from dashinfer_vlm_core.errors import DashInferVLMError, ModelNotFound, UnsupportedParameter
from dashinfer_vlm_core.models.memory import count_weights
from dashinfer_vlm_core.protocol.ollama_models import OllamaModelRequest
from dashinfer_vlm_core.response.ollama_responses import format_time

from ...sse import format_line
from .errors import error_body

if TYPE_CHECKING:
    from dashinfer_vlm_core.engine import ChatEngine, EngineStatus
    from dashinfer_vlm_core.engine.capabilities import Capabilities

    from ...server_context import ServerContext

OLLAMA_VERSION = "0.12.11"
"""The version of Ollama whose API this is, the first one with log probabilities: clients require a minimum."""

_TAG = ":latest"
_NEVER = datetime(9999, 12, 31, tzinfo=timezone.utc)
"""When a model expires that stays loaded."""

_LEVELS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int4": "INT4", "int8": "INT8"}
"""Ollama's `quantization_level` by the bits of quantized weights, or the data type of others."""

_LOADED = frozenset({"ready", "restarting"})


@dataclass(frozen=True)
class Models:
    """The models of a server.

    Attributes:
        server: what the endpoints share.
        started: when the server started, in UTC.
    """

    server: ServerContext
    started: datetime

    def resolve(self, name: str) -> str:
        """Return the name of a model in the engine: the tag `latest` is that of names without one."""
        untagged = name.removesuffix(_TAG)
        known = {found for found, _ in self._names()}
        return next((found for found in (name, untagged, untagged + _TAG) if found in known), untagged)

    async def load(self, name: str) -> int:
        """Load a model that is not loaded, as any request for it does; return how many nanoseconds that took."""
        start = time.perf_counter_ns()
        engine = self.server.engine.for_model(name)
        if engine.status().state != "ready":
            await engine.aencode("")
        return time.perf_counter_ns() - start

    def check_unload(self, request: Request) -> None:
        """Check that a request may unload models.

        Raises:
            UnsupportedParameter: the model of the server stays loaded.
            ApiError: 403, see `ServerContext.check_admin`.
        """
        if not self.server.engine.manages_models:
            raise UnsupportedParameter(
                "`keep_alive` is 0, but the model of this server stays loaded. Remove it, or start the server with"
                " several models, or with --idle-unload.",
                param="keep_alive",
            )
        self.server.check_admin(request)

    def status(self, name: str) -> EngineStatus:
        """Return the status of the model with a name.

        Raises:
            ModelNotFound: there is none.
        """
        return self._find(name)[1]

    async def list_all(self) -> Response:
        """List the models, their aliases and their LoRA adapters."""
        names = [(name, engine) for name, (engine, _) in self._names()]
        return JSONResponse({"models": await asyncio.to_thread(self._models, names)})

    async def list_loaded(self) -> Response:
        """List the models that are loaded."""
        found = [(engine, engine.status()) for engine in self.server.engine.models()]
        loaded = [(engine, status) for engine, status in found if status.state in _LOADED]
        models = await asyncio.to_thread(self._models, [(status.model, engine) for engine, status in loaded])
        now = datetime.now(timezone.utc)
        for model, (_, status) in zip(models, loaded, strict=True):
            del model["modified_at"]
            expires = _NEVER if status.idle_seconds is None else now + timedelta(seconds=status.idle_seconds)
            model |= {"expires_at": format_time(expires), "size_vram": 0, "context_length": status.max_model_len}
        return JSONResponse({"models": models})

    async def version(self) -> Response:
        return JSONResponse({"version": OLLAMA_VERSION})

    async def show(self, request: Request) -> Response:
        """Show what a model supports."""
        parsed = await self.server.read(request, OllamaModelRequest.parse)
        engine, status = self._find(self.resolve(parsed.requested))
        capabilities = await asyncio.to_thread(engine.capabilities)  # it can read files
        return JSONResponse({
            "modified_at": format_time(self.started),
            "details": _details(capabilities),
            "model_info": _model_info(capabilities),
            "capabilities": list(_capabilities(capabilities, status)),
        })  # fmt: skip

    async def pull(self, request: Request) -> Response:
        """Report that a served model is available. Others are not downloaded."""
        parsed = await self.server.read(request, OllamaModelRequest.parse)
        self.status(self.resolve(parsed.requested))
        if not parsed.stream:
            return JSONResponse(_SUCCESS)
        return self.server.stream_lines(_success(), encode=format_json, encode_error=format_error)

    async def refuse(self) -> Response:
        """Refuse to change which models are served."""
        raise UnsupportedParameter(
            "The models of a server are fixed when it starts. Start it with others: --model NAME=FOLDER.",
            code="not_supported",
        )

    def _names(self) -> Iterator[tuple[str, tuple[ChatEngine, EngineStatus]]]:
        for engine in self.server.engine.models():
            status = engine.status()
            for name in (status.model, *status.aliases, *(lora.name for lora in status.loras)):
                yield name, (engine, status)

    def _find(self, name: str) -> tuple[ChatEngine, EngineStatus]:
        known = dict(self._names())
        if name not in known:
            raise ModelNotFound.among(known, name)
        return known[name]

    def _models(self, names: Sequence[tuple[str, ChatEngine]]) -> list[dict[str, Any]]:
        """Return the entries of models. It can read files."""
        return [self._model(name, engine) for name, engine in names]

    def _model(self, name: str, engine: ChatEngine) -> dict[str, Any]:
        """Return the entry of a model. The digest is that of its name, and the size that of its files."""
        tagged = name if ":" in name else name + _TAG
        try:
            capabilities = engine.capabilities()
        except DashInferVLMError:  # it is being loaded, or cannot be
            capabilities = None
        size = capabilities and capabilities.size
        return {
            "name": tagged,
            "model": tagged,
            "modified_at": format_time(self.started),
            "size": size.file_bytes if size else 0,
            "digest": hashlib.sha256(name.encode()).hexdigest(),
            "details": _details(capabilities),
        }


def format_json(value: dict[str, Any]) -> str:
    """Format JSON as a line of a stream."""
    return format_line(pydantic_core.to_json(value).decode())


def format_error(error: Exception) -> str:
    """Format an error as the last line of a stream."""
    return format_json(error_body(error))


_SUCCESS = {"status": "success"}


async def _success() -> AsyncGenerator[dict[str, Any], None]:
    yield _SUCCESS


def _details(capabilities: Capabilities | None) -> dict[str, Any]:
    model_type = capabilities.model_type if capabilities else ""
    size = capabilities and capabilities.size
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": model_type,
        "families": [model_type] if model_type else [],
        "parameter_size": _format_count(count_weights(size)) if size else "",
        "quantization_level": _LEVELS.get(size.stored_bits or size.dtype, "") if size else "",
    }


def _format_count(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"


def _model_info(capabilities: Capabilities) -> dict[str, Any]:
    architecture = capabilities.model_type or "unknown"
    info: dict[str, Any] = {"general.architecture": architecture}
    if capabilities.size:
        info["general.parameter_count"] = count_weights(capabilities.size)
    if capabilities.max_model_len:
        info[f"{architecture}.context_length"] = capabilities.max_model_len
    return info


def _capabilities(capabilities: Capabilities, status: EngineStatus) -> Iterator[str]:
    profile = capabilities.profile
    if capabilities.task == "generate":
        yield "completion"
        if profile.tools:
            yield "tools"
        if profile.reasoning or status.supports_reasoning:
            yield "thinking"
    elif capabilities.task == "embed":
        yield "embedding"
    if profile.images:
        yield "vision"
