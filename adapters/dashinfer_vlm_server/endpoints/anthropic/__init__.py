"""Anthropic's Messages API: `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic_core import to_json

from dashinfer_vlm_core.protocol.anthropic import AnthropicRequest, CountTokensRequest, MessagesRequest
from dashinfer_vlm_core.response.anthropic_events import Event, MessageEventBuilder, to_message

from ...endpoint import ENGINE_STATUSES, Endpoint, Responses
from ...sse import format_event
from .errors import error_body

if TYPE_CHECKING:
    from dashinfer_vlm_core.protocol.converted import ChatCall

    from ...server_context import ServerContext

PROTOCOL = "anthropic"

_OBJECT: Responses = {
    200: {"description": "A message", "content": {"application/json": {"schema": {"type": "object"}}}}
}


def create_endpoints(server: ServerContext) -> Sequence[Endpoint]:
    messages = _Messages(server)
    post = partial(
        Endpoint, method="POST", x_api_key=True, errors=ENGINE_STATUSES, error_body=error_body, responses=_OBJECT
    )
    return [
        post("/v1/messages", messages.create, body=[MessagesRequest], generates=True),
        post("/v1/messages/count_tokens", messages.count_tokens, body=[CountTokensRequest]),
    ]


@dataclass(frozen=True)
class _Messages:
    server: ServerContext

    async def create(self, request: Request) -> Response:
        """Create a message, streamed or complete."""
        parsed, call = await self._read(request, MessagesRequest)
        message_id = f"msg_{uuid.uuid4().hex}"
        thinking = parsed.thinking
        shows_thinking = thinking is None or thinking.display != "omitted"
        if parsed.stream:
            builder = MessageEventBuilder(id=message_id, shows_thinking=shows_thinking)
            events = self._events(call, builder)
            return self.server.stream(events, encode=_format, encode_error=_format_error, model=parsed.model, done="")
        with call.renamed_errors():
            completion = await self.server.run(request, self.server.engine.achat(call.chat))
        return JSONResponse(to_message(completion, id=message_id, shows_thinking=shows_thinking))

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a request's prompt, including those of its images; nothing is generated."""
        _, call = await self._read(request, CountTokensRequest)
        with call.renamed_errors():
            token_ids = await self.server.run(request, self.server.engine.atokenize(call.chat))
        return JSONResponse({"input_tokens": len(token_ids)})

    async def _read(self, request: Request, kind: type[AnthropicRequest]) -> tuple[AnthropicRequest, ChatCall]:
        def parse(data: object) -> tuple[AnthropicRequest, ChatCall]:
            parsed = kind.parse(data)
            return parsed, parsed.to_chat()

        return await self.server.read(request, parse)

    async def _events(self, call: ChatCall, builder: MessageEventBuilder) -> AsyncGenerator[list[Event], None]:
        with call.renamed_errors():
            async with contextlib.aclosing(self.server.engine.astream(call.chat)) as chunks:
                async for chunk in chunks:
                    if events := builder.add_chunk(chunk):
                        yield events
        yield builder.finish()


def _format(events: list[Event]) -> str:
    return "".join(f"event: {event['type']}\n{format_event(to_json(event).decode())}" for event in events)


def _format_error(error: Exception) -> str:
    return f"event: error\n{format_event(json.dumps(error_body(error)))}"
