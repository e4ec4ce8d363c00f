"""The Responses API: `POST /v1/responses`, and the endpoints for stored responses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Query, Request
from fastapi.responses import JSONResponse, Response
from openai.types.responses import CompactedResponse, ResponseCompactionItem
from openai.types.responses import Response as ResponseObject

from dashinfer_vlm_core.concurrency.fair_slots import FairSlots
from dashinfer_vlm_core.errors import ContextLengthExceeded, InvalidParameter, UnsupportedParameter
from dashinfer_vlm_core.protocol.client import current_client
from dashinfer_vlm_core.protocol.response_items import InputItem, encode_summary
from dashinfer_vlm_core.protocol.responses import CompactRequest, ResponsesCall, ResponsesRequest
from dashinfer_vlm_core.response.response_events import (
    ResponseEventBuilder,
    build_types,
    event_to_json,
    response_to_json,
)

from ...endpoint import ENGINE_STATUSES, Endpoint, Responses
from ...errors import ApiError, error_body
from ...sse import format_event
from .input_items import ItemQuery, find_references, list_items, to_stored_item
from .json_stream import JsonStream
from .response_store import ResponseStore, StoredResponse

if TYPE_CHECKING:
    from openai.types.responses import ResponseStreamEvent

    from ...server_context import ServerContext

PROTOCOL = "responses"

STORED_STATUSES = (400, 401, 403, 404, 415, 429, 500)
"""The statuses of errors of endpoints for stored responses."""

RESPONSE_OBJECT: Responses = {
    200: {"description": "A response object", "content": {"application/json": {"schema": {"type": "object"}}}}
}
"""The description of OpenAI's response object. Its schema has hundreds of types and would take long to build."""

ID_BYTES = 24
"""Random bytes of a response's id: a client with the same API key that knows it can read the response."""


def create_endpoints(server: ServerContext) -> Sequence[Endpoint]:
    settings = server.settings
    store = ResponseStore(max_responses=settings.max_stored_responses, max_bytes=settings.max_stored_bytes)
    server.on_keys_changed.append(store.discard_except)
    responses = _Responses(server=server, store=store)
    object_endpoint = partial(Endpoint, responses=RESPONSE_OBJECT)
    post = partial(object_endpoint, method="POST", errors=ENGINE_STATUSES)
    stored = partial(object_endpoint, errors=STORED_STATUSES)
    path = "/v1/responses/{response_id}"
    return [
        post("/v1/responses", responses.create, body=[ResponsesRequest], generates=True),
        post("/v1/responses/compact", responses.compact, body=[CompactRequest], generates=True),
        post("/v1/responses/input_tokens", responses.count_input_tokens, body=[ResponsesRequest]),
        stored(path, responses.retrieve),
        stored(path, responses.delete, method="DELETE"),
        stored(f"{path}/input_items", responses.list_input_items),
        stored(f"{path}/cancel", responses.cancel, method="POST"),
    ]


@dataclass(frozen=True, kw_only=True)
class _Responses:
    """The handlers.

    Attributes:
        store: the stored responses.
        page_slots: clients share the time in which pages of items are made.
    """

    server: ServerContext
    store: ResponseStore
    page_slots: FairSlots = field(default_factory=partial(FairSlots, 1))

    async def create(self, request: Request) -> Response:
        creation = _Creation(self, await self.server.read(request, ResponsesRequest.parse))
        if creation.request.stream:
            return self.server.stream(
                creation.events(), encode=_format, encode_error=creation.error_events, model=creation.request.model
            )
        response = await self.server.run(request, creation.complete())
        return Response(_to_json(response), media_type="application/json")

    async def count_input_tokens(self, request: Request) -> Response:
        """Count the tokens of a request's prompt, including those of its images and videos; nothing is generated."""
        creation = _Creation(self, await self.server.read(request, ResponsesRequest.parse))
        count = await self.server.run(request, creation.count_input_tokens())
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})

    async def compact(self, request: Request) -> Response:
        """Let the model summarize a conversation; return the summary as an item for later requests."""
        compact = await self.server.read(request, CompactRequest.parse)
        summary = await self.server.run(request, _Creation(self, compact.to_summary_request()).complete())
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
        return Response(compacted.model_dump_json(exclude_unset=True), media_type="application/json")

    async def retrieve(self, request: Request, response_id: str) -> Response:
        """Return a stored response as it was created."""
        if request.query_params.get("stream", "false").lower() != "false":
            raise UnsupportedParameter(
                "`stream` is not supported for stored responses: their events are not stored. Remove it.",
                param="stream",
            )
        return Response(self._stored(response_id).body, media_type="application/json")

    async def list_input_items(self, response_id: str, query: Annotated[ItemQuery, Query()]) -> Response:
        """Return a page of the items that a stored response was generated from, those of earlier responses included."""
        client = current_client.get().id
        async with self.page_slots.slot(client, limit=1):
            stored = self._stored(response_id)  # not before: what waits for a slot holds no items
            page = await asyncio.to_thread(lambda: list_items(stored.context(), query))
        stream = JsonStream(dict(page), slots=self.page_slots, client=client)  # may contain megabytes of images
        if not self.store.add_reader(client, response_id, stream):
            raise _response_not_found(response_id)
        return stream

    async def delete(self, response_id: str) -> Response:
        """Delete a stored response. Responses that continue it keep its items."""
        if not self.store.delete(current_client.get().id, response_id):
            raise _response_not_found(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, response_id: str) -> Response:
        """Reject: as in OpenAI's API, only responses that are created in the background can be canceled."""
        self._stored(response_id)
        raise InvalidParameter(
            "Cannot cancel a synchronous response. To cancel a response while it is created, close the connection."
        )

    def previous(self, request: ResponsesRequest) -> StoredResponse | None:
        """Return the stored response that a request continues, which must be of the same model."""
        response_id = request.previous_response_id
        if response_id is None:
            return None
        previous = self.store.get(current_client.get().id, response_id)
        if previous is None or previous.model != self.model_of(request):
            raise InvalidParameter(
                f"Previous response with id {response_id[:80]!r} not found. It was not stored, is of another model, or"
                " has been removed to store newer ones. Send the conversation in `input`.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return previous

    def model_of(self, request: ResponsesRequest) -> str:
        """Return the name of the model that serves a request; empty if models are not managed."""
        engine = self.server.engine
        return engine.for_model(request.model).status().model if engine.manages_models else ""

    def _stored(self, response_id: str) -> StoredResponse:
        if (found := self.store.get(current_client.get().id, response_id)) is None:
            raise _response_not_found(response_id)
        return found


class _Creation:
    """The creation of one response.

    Attributes:
        request: the request; from `_convert` on, with the items that it refers to.
    """

    def __init__(self, routes: _Responses, request: ResponsesRequest) -> None:
        self.request = request
        self._engine = routes.server.engine
        self._routes = routes
        self._references: Mapping[str, Mapping[str, Any]] = {}
        self._builder: ResponseEventBuilder | None = None
        self._response: ResponseObject | None = None

    async def complete(self) -> ResponseObject:
        """Create the response. It is built like a streamed one, so that both are equal."""
        async with contextlib.aclosing(self.events()) as events:
            async for _ in events:
                pass
        assert self._response is not None, "the events end with a response"
        return self._response

    async def events(self) -> AsyncGenerator[ResponseStreamEvent, None]:
        """Create the response; yield its events."""
        store = self._routes.store
        previous = self._routes.previous(self.request)
        await self._check_summary()
        call = await self._chat_call(previous)
        stored = self.request.store and store.enabled
        response_id = f"resp_{secrets.token_hex(ID_BYTES)}"
        builder = ResponseEventBuilder(id=response_id, request=self.request, chat=call.chat, stored=stored)
        self._builder = builder
        with call.renamed_errors():
            async with contextlib.aclosing(self._engine.astream(call.chat)) as chunks:
                async for chunk in chunks:
                    for event in builder.add_chunk(chunk):
                        yield event
        last_events, self._response = builder.finish()
        if stored:
            await asyncio.to_thread(self._store, self._response, previous)
        for event in last_events:
            yield event

    async def count_input_tokens(self) -> int:
        """Return the number of tokens of the prompt. Raises like `events`."""
        call = await self._chat_call(self._routes.previous(self.request))
        with call.renamed_errors():
            return len(await self._engine.atokenize(call.chat))

    def error_events(self, error: Exception) -> str:
        """Format an error after the first event."""
        body = error_body(error)["error"]
        if self._builder is None:  # the model could not be loaded to count the tokens of the prompt
            return f"event: error\n{format_event(json.dumps({**body, 'type': 'error', 'sequence_number': 0}))}"
        return "".join(map(_format, self._builder.fail(body)))

    async def _check_summary(self) -> None:
        if not self.request.wants_summary:
            return
        status = await asyncio.to_thread(self._engine.for_model(self.request.model).status)
        if status.supports_reasoning is False:
            raise UnsupportedParameter(
                "`reasoning.summary` is not supported: the model does not have a reasoning phase. Remove it.",
                param="reasoning.summary",
            )

    async def _chat_call(self, previous: StoredResponse | None) -> ResponsesCall:
        history, call = await asyncio.to_thread(self._convert, previous)
        if self.request.truncation == "disabled" or await self._fits(call):
            return call
        # The smallest number of turns without which the rest fits, or all but one.
        low = 1
        high = max(0, call.turns - 1)
        while low < high:
            middle = (low + high) // 2
            call = await asyncio.to_thread(self.request.to_chat, history, dropped_turns=middle)
            low, high = (low, middle) if await self._fits(call) else (middle + 1, high)
        return await asyncio.to_thread(self.request.to_chat, history, dropped_turns=high)

    def _convert(self, previous: StoredResponse | None) -> tuple[Sequence[InputItem], ResponsesCall]:
        build_types()
        items = () if previous is None else previous.conversation()
        model = self._routes.model_of(self.request)
        find = partial(self._routes.store.find_items, current_client.get().id, model=model)
        self._references = find_references(self.request.items(), items, find)
        if self._references:
            self.request = self.request.with_references(self._references)
        history = [InputItem.model_validate(item) for item in items]
        return history, self.request.to_chat(history)

    async def _fits(self, call: ResponsesCall) -> bool:
        try:
            with call.renamed_errors():
                await self._engine.atokenize(call.chat)
        except ContextLengthExceeded:
            return False
        return True

    def _store(self, response: ResponseObject, previous: StoredResponse | None) -> None:
        # Items that were referred to are not copied, and keep their IDs.
        items = tuple(self._references.get(item.id or "") or to_stored_item(item) for item in self.request.items())
        stored = StoredResponse(
            id=response.id,
            body=_to_json(response).encode(),
            input=items,
            output_ids=tuple(item.id for item in response.output if item.id is not None),
            previous=previous,
            model=self._routes.model_of(self.request),
        )
        self._routes.store.add(current_client.get().id, stored)


def _to_json(response: ResponseObject) -> str:
    return json.dumps(response_to_json(response), ensure_ascii=False)


def _format(event: ResponseStreamEvent) -> str:
    return f"event: {event.type}\n{format_event(event_to_json(event))}"


def _response_not_found(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"Response with id {response_id[:80]!r} not found. It was not stored, was deleted, or has been removed to store"
        " newer ones.",
        code="response_not_found",
    )
