"""`POST /api/chat` and `POST /api/generate`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from dashinfer_vlm_core.protocol.ollama import OllamaChatRequest, OllamaCompletionRequest, OllamaGenerateRequest
from dashinfer_vlm_core.response.ollama_responses import Durations, Form, Line, OllamaResponseBuilder

from .models import Models, format_error, format_json

if TYPE_CHECKING:
    from dashinfer_vlm_core.protocol.converted import ChatCall

    from ...server_context import ServerContext


@dataclass(frozen=True, kw_only=True, slots=True)
class _Exchange:
    """A request and its response.

    Attributes:
        request: the request.
        model: the model's name in the engine.
        builder: builds the response.
        start: when the request arrived, in nanoseconds.
    """

    request: OllamaCompletionRequest
    model: str
    builder: OllamaResponseBuilder
    start: int


@dataclass(frozen=True)
class Completions:
    """Responses that a model generates.

    Attributes:
        server: what the endpoints share.
        models: the models.
    """

    server: ServerContext
    models: Models

    async def chat(self, request: Request) -> Response:
        """Generate the next message of a conversation; without messages, load or unload the model."""
        return await self._respond(request, OllamaChatRequest.parse, "chat")

    async def generate(self, request: Request) -> Response:
        """Generate a response to a prompt; without one, load or unload the model."""
        return await self._respond(request, OllamaGenerateRequest.parse, "generate")

    async def _respond(
        self, request: Request, parse: Callable[[object], OllamaCompletionRequest], form: Form
    ) -> Response:
        def read(data: object) -> tuple[OllamaCompletionRequest, ChatCall | None]:
            parsed = parse(data)
            return parsed, None if parsed.is_empty else parsed.to_chat()

        start = time.perf_counter_ns()
        parsed, call = await self.server.read(request, read)
        if parsed.unloads:
            self.models.check_unload(request)
        builder = OllamaResponseBuilder(form, parsed.model, created=datetime.now(timezone.utc))
        model = self.models.resolve(parsed.model)
        exchange = _Exchange(request=parsed, model=model, builder=builder, start=start)
        if call is None:
            return JSONResponse(await self.server.run(request, self._load_or_unload(exchange)))
        lines = self._lines(exchange, call)
        if parsed.stream:
            return self.server.stream_lines(lines, encode=format_json, encode_error=format_error)
        return JSONResponse(await self.server.run(request, _only(lines)))

    async def _load_or_unload(self, exchange: _Exchange) -> Line:
        self.models.status(exchange.model)
        if exchange.request.unloads:
            await self.server.engine.aunload(exchange.model)
            return exchange.builder.without_content("unload")
        await self.models.load(exchange.model)
        return exchange.builder.without_content("load")

    async def _lines(self, exchange: _Exchange, call: ChatCall) -> AsyncGenerator[Line, None]:
        builder = exchange.builder
        chat = call.chat.model_copy(update={"model": exchange.model})
        load = await self.models.load(exchange.model)
        first = 0
        try:
            with call.renamed_errors():
                async with contextlib.aclosing(self.server.engine.astream(chat)) as chunks:
                    async for chunk in chunks:
                        if not first:
                            first = time.perf_counter_ns()
                            await self._unload_afterwards(exchange)
                        line = builder.add_chunk(chunk)
                        if line and exchange.request.stream:
                            yield line
        finally:
            if not first:
                await self._unload_afterwards(exchange)
        total = time.perf_counter_ns() - exchange.start
        durations = Durations(load=load, prompt=first - exchange.start - load, total=total)
        yield builder.finish(durations) if exchange.request.stream else builder.complete(durations)

    async def _unload_afterwards(self, exchange: _Exchange) -> None:
        """Unload the model when the request ends, if it says so: also if it fails. A model that cannot be unloaded is
        an error before the first line."""
        if exchange.request.unloads:
            await self.server.engine.aunload(exchange.model)


async def _only(lines: AsyncGenerator[Line, None]) -> Line:
    async with contextlib.aclosing(lines):
        return await anext(lines)
