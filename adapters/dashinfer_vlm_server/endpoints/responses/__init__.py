"""The Responses API: `POST /v1/responses`, and the endpoints for stored responses."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated

from fastapi import Query, Request
from fastapi.responses import JSONResponse, Response
from openai.types.responses import CompactedResponse, ResponseCompactionItem
from pydantic import BaseModel, Field

from dashinfer_vlm_core.concurrency.fair_slots import FairSlots
from dashinfer_vlm_core.errors import EngineError, InvalidParameter, UnsupportedParameter
from dashinfer_vlm_core.protocol.client import current_client
from dashinfer_vlm_core.protocol.response_items import encode_summary
from dashinfer_vlm_core.protocol.responses import CompactRequest, ResponsesRequest

from ...endpoint import ENGINE_STATUSES, Endpoint, Responses, WebSocketEndpoint
from ...sse import EventStream
from .background import BackgroundResponses
from .creation import (
    Conversations,
    Creation,
    error_event,
    format_response_event,
    response_json,
    response_not_found,
)
from .input_items import ItemQuery, list_items
from .json_stream import JsonStream
from .response_store import ResponseStore, StoredEvents, StoredResponse
from .websocket import ResponseSockets

if TYPE_CHECKING:
    from openai.types.responses import Response as ResponseObject

    from ...server_context import ServerContext

PROTOCOL = "responses"

STORED_STATUSES = (400, 401, 403, 404, 415, 429, 500)
"""The statuses of errors of endpoints for stored responses."""

RESPONSE_OBJECT: Responses = {
    200: {"description": "A response object", "content": {"application/json": {"schema": {"type": "object"}}}}
}
"""The description of OpenAI's response object. Its schema has hundreds of types and would take long to build."""


def create_endpoints(server: ServerContext) -> Sequence[Endpoint | WebSocketEndpoint]:
    settings = server.settings
    store = ResponseStore(max_responses=settings.max_stored_responses, max_bytes=settings.max_stored_bytes)
    server.on_keys_changed.append(store.discard_except)
    conversations = Conversations(engine=server.engine, store=store)
    responses = _Responses(
        server=server,
        conversations=conversations,
        store=store,
        background=BackgroundResponses(server, store),
    )
    object_endpoint = partial(Endpoint, responses=RESPONSE_OBJECT)
    post = partial(object_endpoint, method="POST", errors=ENGINE_STATUSES)
    stored = partial(object_endpoint, errors=STORED_STATUSES)
    path = "/v1/responses/{response_id}"
    return [
        post("/v1/responses", responses.create, body=[ResponsesRequest], generates=True),
        WebSocketEndpoint("/v1/responses", ResponseSockets(server, conversations).serve),
        post("/v1/responses/compact", responses.compact, body=[CompactRequest], generates=True),
        post("/v1/responses/input_tokens", responses.count_input_tokens, body=[ResponsesRequest]),
        stored(path, responses.retrieve),
        stored(path, responses.delete, method="DELETE"),
        stored(f"{path}/input_items", responses.list_input_items),
        stored(f"{path}/cancel", responses.cancel, method="POST", limited=False),
    ]


class RetrieveQuery(BaseModel):
    """Query parameters of a stored response.

    Attributes:
        stream: whether its events are sent, those to come included.
        starting_after: the sequence number of the last event that the client has.
    """

    stream: bool = False
    starting_after: Annotated[int, Field(ge=0)] | None = None


@dataclass(frozen=True, kw_only=True)
class _Responses:
    """The handlers.

    Attributes:
        conversations: the engine, and the stored responses.
        store: the stored responses.
        background: creates responses in the background.
        page_slots: clients share the time in which pages of items are made.
    """

    server: ServerContext
    conversations: Conversations
    store: ResponseStore
    background: BackgroundResponses
    page_slots: FairSlots = field(default_factory=partial(FairSlots, 1))

    async def create(self, request: Request) -> Response:
        creation = Creation(self.conversations, await self.server.read(request, ResponsesRequest.parse))
        if creation.request.background:
            response = await self.server.run(request, self.background.start(creation))
            if creation.request.stream:
                return _event_stream(response, after=-1)
            return _json_response(self._stored(response.id).current_body())
        if creation.request.stream:
            return self.server.stream(
                creation.events(),
                encode=format_response_event,
                encode_error=creation.error_events,
                model=creation.request.model,
            )
        created = await self.server.run(request, creation.complete())
        return _json_response(await asyncio.to_thread(response_json, created))  # it may have many log probabilities

    async def count_input_tokens(self, request: Request) -> Response:
        """Count the tokens of a request's prompt, including those of its images and videos; nothing is generated."""
        creation = Creation(self.conversations, await self.server.read(request, ResponsesRequest.parse))
        count = await self.server.run(request, creation.count_input_tokens())
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})

    async def compact(self, request: Request) -> Response:
        """Let the model summarize a conversation; return the summary as an item for later requests."""
        compact = await self.server.read(request, CompactRequest.parse)
        summary = await self.server.run(request, self._summarize(compact))
        assert summary.usage is not None, "the usage was requested"
        item = ResponseCompactionItem(
            id=f"cmp_{uuid.uuid4().hex}", type="compaction", encrypted_content=encode_summary(summary.output_text)
        )
        compacted = CompactedResponse(
            id=summary.id,
            object="response.compaction",
            created_at=int(summary.created_at),
            output=[item],
            usage=summary.usage,
        )
        return _json_response(compacted.model_dump_json(exclude_unset=True))

    async def _summarize(self, compact: CompactRequest) -> ResponseObject:
        try:
            summary = await Creation(self.conversations, compact.to_summary_request("none")).complete()
        except UnsupportedParameter as error:  # the model always reasons
            if error.param != "reasoning.effort":
                raise
            summary = await Creation(self.conversations, compact.to_summary_request(None)).complete()
        if summary.status == "completed" and summary.output_text:
            return summary
        tokens = summary.usage.output_tokens if summary.usage else 0
        raise EngineError(
            f"The model did not complete the summary, for which it wrote {tokens} tokens. Send fewer items.",
            code="incomplete_summary",
        )

    async def retrieve(self, response_id: str, query: Annotated[RetrieveQuery, Query()]) -> Response:
        """Return a stored response as it is now, or its events."""
        stored = self._stored(response_id)
        if query.starting_after is not None and not query.stream:
            raise InvalidParameter("`starting_after` requires `stream`. Set `stream` to true.", param="starting_after")
        if not query.stream:
            return _json_response(stored.current_body())
        if stored.background is None:
            raise UnsupportedParameter(
                "`stream` is not supported for this response: only the events of responses with `background` are"
                " stored. Remove it.",
                param="stream",
            )
        return _event_stream(stored.background, after=-1 if query.starting_after is None else query.starting_after)

    async def list_input_items(self, response_id: str, query: Annotated[ItemQuery, Query()]) -> Response:
        """Return a page of the items that a stored response was generated from, those of earlier responses included."""
        client = current_client.get().id
        async with self.page_slots.slot(client, limit=1):
            stored = self._stored(response_id)  # not before: what waits for a slot holds no items
            page = await asyncio.to_thread(lambda: list_items(stored.context(), query))
        stream = JsonStream(dict(page), slots=self.page_slots, client=client)  # may contain megabytes of images
        if not self.store.add_reader(client, response_id, stream):
            raise response_not_found(response_id)
        return stream

    async def delete(self, response_id: str) -> Response:
        """Delete a stored response. Responses that continue it keep its items."""
        if not self.store.delete(current_client.get().id, response_id):
            raise response_not_found(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, response_id: str) -> Response:
        """Cancel a response that is created in the background; one that has ended is returned."""
        background = self._stored(response_id).background
        if background is None:
            raise InvalidParameter(
                "Cannot cancel a synchronous response. To cancel a response while it is created, close the connection,"
                " or create it with `background`."
            )
        await background.cancel()
        return _json_response(self._stored(response_id).current_body())

    def _stored(self, response_id: str) -> StoredResponse:
        if (found := self.store.get(current_client.get().id, response_id)) is None:
            raise response_not_found(response_id)
        return found


def _json_response(body: str | bytes) -> Response:
    return Response(body, media_type="application/json")


def _event_stream(response: StoredEvents, *, after: int) -> EventStream[bytes]:
    return EventStream(response.read(after), encode=bytes, encode_error=error_event)
