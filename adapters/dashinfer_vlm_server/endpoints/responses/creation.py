"""The creation of one response: from the request to events, and to what is stored."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from openai.types.responses import Response as ResponseObject

from dashinfer_vlm_core.engine.validation import check_task
from dashinfer_vlm_core.errors import ContextLengthExceeded, InvalidParameter, MediaTooLarge, UnsupportedParameter
from dashinfer_vlm_core.protocol import DEFAULT_MODEL
from dashinfer_vlm_core.protocol.client import current_client
from dashinfer_vlm_core.protocol.response_items import InputItem
from dashinfer_vlm_core.protocol.responses import ResponsesCall, ResponsesRequest
from dashinfer_vlm_core.response.response_events import (
    Event,
    ResponseEventBuilder,
    build_types,
    event_to_json,
    response_to_json,
)

from ...errors import ApiError, error_body
from ...sse import format_event
from .input_items import find_references, to_stored_item
from .response_store import ResponseStore, StoredEvents, StoredResponse

if TYPE_CHECKING:
    from dashinfer_vlm_core.engine import ChatEngine

ID_BYTES = 24
"""Random bytes of a response's id: a client with the same API key that knows it can read the response."""

MAX_UNCHECKED_CHARACTERS = 64 * 1024
"""Instructions and descriptions of tools up to this length are put into events before the prompt is tokenized."""

FINAL_STATUSES = frozenset({"completed", "incomplete"})
"""Statuses of responses that others can continue."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversations:
    """The engine, and the stored responses of all clients.

    Attributes:
        engine: the engine.
        store: the stored responses.
        connection: the WebSocket of the requests; its responses with `store` false can be continued, too.
    """

    engine: ChatEngine
    store: ResponseStore
    connection: str = ""

    def previous(self, request: ResponsesRequest) -> StoredResponse | None:
        """Return the stored response that a request continues, which must be complete, and of the same model."""
        response_id = request.previous_response_id
        if response_id is None:
            return None
        previous = self.store.get(current_client.get().id, response_id, connection=self.connection)
        if previous is None or previous.model != self.model_of(request):
            raise InvalidParameter(
                f"Previous response with id {response_id[:80]!r} not found. It was not stored, is of another model, or"
                " has been removed to store newer ones. Send the conversation in `input`.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        if previous.status not in FINAL_STATUSES:
            raise InvalidParameter(
                f"Previous response with id {response_id[:80]!r} cannot be continued: it is running, has failed or was"
                " canceled. Wait until it is `completed`, or send the conversation in `input`.",
                param="previous_response_id",
            )
        return previous

    def model_of(self, request: ResponsesRequest) -> str:
        """Return the name of the model that serves a request; empty if models are not managed."""
        engine = self.engine
        return engine.for_model(request.model).status().model if engine.manages_models else ""

    def shown_model(self, request: ResponsesRequest) -> str:
        """Return the name of the model in the response to a request, before it is served. May block."""
        status = self.engine.for_model(request.model).status()
        return status.model if request.model in {DEFAULT_MODEL, *status.aliases} else request.model


class Creation:
    """The creation of one response. `prepare` comes first.

    Args:
        conversations: the responses that it can continue.
        request: the request.

    Attributes:
        request: the request; after `prepare`, with the items that it refers to.
        id: the id of the response.
        stored: whether the response is stored.
    """

    def __init__(self, conversations: Conversations, request: ResponsesRequest) -> None:
        self.request = request
        self.id = f"resp_{secrets.token_hex(ID_BYTES)}"
        self.stored: bool = request.store and conversations.store.enabled
        self._conversations = conversations
        self._engine = conversations.engine
        self._previous: StoredResponse | None = None
        self._references: Mapping[str, Mapping[str, Any]] = {}
        self._call: ResponsesCall | None = None
        self._builder: ResponseEventBuilder | None = None
        self._response: ResponseObject | None = None
        self._discarded = False

    @property
    def builder(self) -> ResponseEventBuilder:
        assert self._builder is not None, "the request was prepared"
        return self._builder

    async def prepare(self) -> None:
        """Convert the request to a chat request, with the items of the conversation.

        Raises:
            RequestError: the request is invalid; `param` names its field.
        """
        self._previous = self._conversations.previous(self.request)
        await self._check_summary()
        self._call = await self._chat_call()
        self._builder = ResponseEventBuilder(id=self.id, request=self.request, chat=self._call.chat, stored=self.stored)

    async def complete(self) -> ResponseObject:
        """Create the response. It is built like a streamed one, so that both are equal."""
        async with contextlib.aclosing(self.events()) as events:
            async for _ in events:
                pass
        assert self._response is not None, "the events end with a response"
        return self._response

    async def events(self) -> AsyncGenerator[Event, None]:
        """Prepare and create the response, and store it; yield its events."""
        async with contextlib.aclosing(self.generate()) as events:
            async for event in events:
                yield event
        last_events, self._response = self.builder.finish()
        await asyncio.to_thread(self._save, self._response)
        for event in last_events:
            yield event

    async def generate(self) -> AsyncGenerator[Event, None]:
        """Create the response, prepared or not; yield its events up to the last chunk, before `builder.finish`."""
        if self._call is None:
            await self.prepare()
        assert self._call is not None, "the request was prepared"
        with self._call.renamed_errors():
            async with contextlib.aclosing(self._engine.astream(self._call.chat)) as chunks:
                async for chunk in chunks:
                    for event in self.builder.add_chunk(chunk):
                        yield event

    def _save(self, response: ResponseObject) -> None:
        if self.stored or (self._conversations.connection and self._conversations.store.enabled):
            self._conversations.store.add(current_client.get().id, self.to_stored(response))
            if self._discarded:
                self._delete()

    def discard(self) -> None:
        """Remove the response from the store, also if a thread adds it only later."""
        self._discarded = True
        self._delete()

    def _delete(self) -> None:
        self._conversations.store.delete(current_client.get().id, self.id)

    async def queue(self) -> Sequence[Event]:
        """Begin the response before it is generated; return its events."""
        return self.builder.queue(await asyncio.to_thread(self._conversations.shown_model, self.request))

    async def count_input_tokens(self) -> int:
        """Return the number of tokens of the prompt. Raises like `events`."""
        await self.prepare()
        return await self._count_tokens()

    async def check_served(self) -> None:
        """Check that the engine is ready and has the model. A model that may have to be loaded for it is not checked.

        Raises:
            EngineClosed: it is not ready.
            ModelNotFound: it has no model of this name.
            UnsupportedParameter: the model does not generate text.
        """
        if not self._engine.manages_models:
            message = {"role": "user", "content": "?"}
            await self._engine.atokenize({"model": self.request.model, "messages": [message]})
            status = self._engine.status()
            check_task(status.task or "generate", "generate", name=status.model)

    async def check_length(self) -> None:
        """Check that the prompt fits if its text is large that the response and several of its events repeat.

        Raises:
            ContextLengthExceeded: it does not.
        """
        texts = (self.request.instructions, *(tool.description for tool in self.request.tools))
        if sum(len(text or "") for text in texts) > MAX_UNCHECKED_CHARACTERS:
            await self._count_tokens()

    async def _count_tokens(self) -> int:
        assert self._call is not None, "the request was prepared"
        with self._call.renamed_errors():
            return len(await self._engine.atokenize(self._call.chat))

    def failed_event(self, error: Exception) -> Event | None:
        """Return the event that ends the response with an error; None before the first event."""
        if self._builder is None or not self._builder.has_begun:
            return None
        return self._builder.fail(error_body(error)["error"])[0][-1]

    def error_events(self, error: Exception) -> str:
        """Format an error after the first event."""
        if self._builder is None:  # the model could not be loaded to count the tokens of the prompt
            return error_event(error)
        return "".join(map(format_response_event, self._builder.fail(error_body(error)["error"])[0]))

    def to_stored(self, response: ResponseObject, background: StoredEvents | None = None) -> StoredResponse:
        """Return what is stored of a response. Only a complete one has output that others can refer to."""
        status = response.status or "completed"
        output = response.output if status in FINAL_STATUSES else ()
        return StoredResponse(
            id=response.id,
            body=response_json(response).encode(),
            input=self._stored_items,
            output_ids=tuple(item.id for item in output if item.id is not None),
            previous=self._previous,
            model=self._conversations.model_of(self.request),
            status=status,
            background=background,
            connection="" if self.stored else self._conversations.connection,
        )

    @cached_property
    def _stored_items(self) -> tuple[Mapping[str, Any], ...]:
        # Items that were referred to are not copied, and keep their IDs.
        return tuple(self._references.get(item.id or "") or to_stored_item(item) for item in self.request.items())

    async def _check_summary(self) -> None:
        if not self.request.wants_summary:
            return
        status = await asyncio.to_thread(self._engine.for_model(self.request.model).status)
        if status.supports_reasoning is False:
            raise UnsupportedParameter(
                "`reasoning.summary` is not supported: the model does not have a reasoning phase. Remove it.",
                param="reasoning.summary",
            )

    async def _chat_call(self) -> ResponsesCall:
        history, call = await asyncio.to_thread(self._convert)
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

    def _convert(self) -> tuple[Sequence[InputItem], ResponsesCall]:
        build_types()
        items = () if self._previous is None else self._previous.conversation()
        model = self._conversations.model_of(self.request)
        find = partial(
            self._conversations.store.find_items,
            current_client.get().id,
            model=model,
            connection=self._conversations.connection,
        )
        self._references = find_references(self.request.items(), items, find)
        if self._references:
            self.request = self.request.with_references(self._references)
        history = [InputItem.model_validate(item) for item in items]
        return history, self.request.to_chat(history)

    async def _fits(self, call: ResponsesCall) -> bool:
        try:
            with call.renamed_errors():
                await self._engine.atokenize(call.chat)
        except (ContextLengthExceeded, MediaTooLarge):  # also if there are too many images or videos
            return False
        return True


def response_json(response: ResponseObject) -> str:
    """Return a response as JSON text."""
    return json.dumps(response_to_json(response), ensure_ascii=False)


def format_response_event(event: Event) -> str:
    """Format an event as a server-sent event."""
    return f"event: {event['type']}\n{format_event(event_to_json(event))}"


def error_event(error: Exception) -> str:
    """Format an error as an event of a response that is not available."""
    body = error_body(error)["error"]
    fields = {**body, "type": "error", "error": body, "sequence_number": 0}
    return f"event: error\n{format_event(json.dumps(fields))}"


def response_not_found(response_id: str) -> ApiError:
    """Return the error for a response that is not stored, or belongs to another client."""
    return ApiError(
        404,
        f"Response with id {response_id[:80]!r} not found. It was not stored, was deleted, or has been removed to store"
        " newer ones.",
        code="response_not_found",
    )
