"""Responses that are created in the background: their tasks, and the events that clients read later."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

from dashinfer_vlm_core.concurrency.deadline import stream_with_timeout
from dashinfer_vlm_core.errors import DashInferVLMError, InvalidParameter
from dashinfer_vlm_core.protocol.client import current_client

from ...errors import error_body
from ...rate_limits import hold_request
from ...request_context import SLICE_BYTES
from ...sse import Discarded
from .creation import Creation, format_response_event, response_json, response_not_found

if TYPE_CHECKING:
    from openai.types.responses import Response as ResponseObject

    from dashinfer_vlm_core.response.response_events import Event

    from ...server_context import ServerContext
    from .response_store import ResponseStore

logger: logging.Logger = logging.getLogger(__name__)

RETRY_SECONDS = 1
"""`Retry-After` of a client with too many responses in the background: when one of them ends cannot be known."""


class BackgroundResponse:
    """A response that is created in the background. Belongs to one event loop, except for `discard`.

    Its events are kept as they are sent, in the order of their sequence numbers, so that any number of clients can read
    them from any of them on.

    Args:
        creation: the creation of the response, which has been prepared.
        store: where the response is stored from `queue` on.
        client: the id of the client.
    """

    def __init__(self, creation: Creation, store: ResponseStore, client: str) -> None:
        self.id: str = creation.id
        self._creation: Creation | None = creation  # None after its end: it holds the media of the request
        self._store = store
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._events: list[bytes] = []
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()
        self._discarded = False
        self._stopped = False
        self._generation: asyncio.Task[None] | None = None

    def body(self) -> str:
        """Return the response so far as JSON text, while it is created.

        Raises:
            ApiError: the request that creates it was canceled.
        """
        if self._creation is None:
            raise response_not_found(self.id)
        return response_json(self._creation.builder.snapshot())

    async def read(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the events after a sequence number, and those to come; a large one in several parts.

        Raises:
            ApiError: the response was removed from the store.
            Discarded: it was removed within an event.
            InvalidParameter: the response has ended, and no event has this number.
        """
        position = after + 1
        offset = 0
        while not self._discarded:
            changed = self._changed
            events = self._events
            if position < len(events):
                data = events[position][offset : offset + SLICE_BYTES]
                offset += len(data)
                if offset == len(events[position]):
                    position += 1
                    offset = 0
                del events  # a client that does not read would keep them after they are discarded
                yield data
            elif self._ended.is_set():
                if after >= len(events):
                    raise _no_such_event(after, last=len(events) - 1)
                return
            else:
                await changed.wait()
        raise Discarded if offset else response_not_found(self.id)

    async def cancel(self) -> None:
        """Cancel the generation, and return when it has ended."""
        self._stop()
        await self._ended.wait()

    def discard(self) -> None:
        """Cancel the generation and release the events: the response was removed from the store. Thread-safe."""
        self._discarded = True
        self._events = []
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._stop)

    async def queue(self) -> None:
        """Store the response as one that waits. After an exception, it is not stored.

        Raises:
            InvalidParameter: it needs more memory than there is for stored responses.
        """
        try:
            await self._queue()
        except BaseException:
            self.discard()
            self._store.delete(self._client, self.id)
            self._finish()
            raise

    async def _queue(self) -> None:
        creation = self._creation
        assert creation is not None, "it has not ended"
        events = await creation.queue()
        await asyncio.to_thread(self._add, creation, creation.builder.snapshot())
        if self._store.get(self._client, self.id) is None:
            raise InvalidParameter(
                "The request needs more memory than there is for stored responses. Send smaller media, or remove"
                " `background`.",
                param="background",
            )
        self._keep(events)

    def _add(self, creation: Creation, snapshot: ResponseObject) -> None:
        self._store.add(self._client, creation.to_stored(snapshot, self))
        if self._discarded:  # the request was canceled, which does not end this thread
            self._store.delete(self._client, self.id)

    async def run(self, *, timeout: float | None) -> None:
        """Generate the response, and store it. A response whose generation has ended is not canceled anymore."""
        creation = self._creation
        assert creation is not None, "it has not ended"
        self._generation = asyncio.create_task(self._generate(creation.generate(), timeout))
        if self._stopped:
            self._generation.cancel()
        try:
            await asyncio.wait({self._generation})
            self._keep(await asyncio.to_thread(self._save_end, creation, self._generation))
        finally:
            self._generation.cancel()  # without effect if it has ended
            self._finish()

    def _save_end(self, creation: Creation, generation: asyncio.Task[None]) -> Sequence[Event]:
        events, response = _end(creation, generation)
        self._store.update(self._client, creation.to_stored(response, self))
        return events

    async def _generate(self, events: AsyncGenerator[Event, None], timeout: float | None) -> None:
        async with contextlib.aclosing(stream_with_timeout(events, seconds=timeout, first=None)) as timed:
            async for event in timed:
                self._keep([event])

    def _keep(self, events: Sequence[Event]) -> None:
        added = [format_response_event(event).encode() for event in events]
        if not self._discarded:
            self._events += added
            self._store.add_bytes(self._client, self.id, sum(map(sys.getsizeof, added)))
        self._notify()

    def _finish(self) -> None:
        self._creation = None
        self._ended.set()
        self._notify()

    def _stop(self) -> None:
        self._stopped = True
        if self._generation is not None:
            self._generation.cancel()
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class BackgroundResponses:
    """Creates responses in the background, a limited number of each client at a time.

    Args:
        server: has the limit and the timeout; its `drain_state` counts the running ones.
        store: the stored responses.
    """

    def __init__(self, server: ServerContext, store: ResponseStore) -> None:
        self._server = server
        self._store = store
        self._running: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, creation: Creation) -> BackgroundResponse:
        """Prepare and store a response, and begin to generate it.

        Raises:
            RequestError: the request is invalid, or responses are not stored.
            EngineError: the engine cannot serve requests now.
            HTTPException: 429, the client has as many running ones as it can.
        """
        client = current_client.get().id
        if not self._store.enabled:
            raise InvalidParameter(
                "`background` requires stored responses, which this server does not have. Remove it, or start the"
                " server with --max-stored-responses above 0.",
                param="background",
            )
        await creation.prepare()
        await creation.check_served()
        await creation.check_length()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._slot(client))
            stack.enter_context(hold_request())
            response = BackgroundResponse(creation, self._store, client)
            await response.queue()
            task = asyncio.create_task(self._run(response, stack.pop_all()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return response

    async def _run(self, response: BackgroundResponse, slots: contextlib.ExitStack) -> None:
        with slots:
            await response.run(timeout=self._server.settings.request_timeout)

    @contextlib.contextmanager
    def _slot(self, client: str) -> Iterator[None]:
        limit = self._server.settings.max_background_responses
        if self._running[client] >= limit:
            raise HTTPException(
                429,
                f"Rate limit reached: an API key can have {limit} responses that are created in the background. Try"
                " again when one has ended, or cancel one.",
                headers={"Retry-After": str(RETRY_SECONDS)},
            )
        self._running[client] += 1
        self._server.drain_state.background += 1
        try:
            yield
        finally:
            self._running -= Counter([client])
            self._server.drain_state.background -= 1


def _no_such_event(number: int, *, last: int) -> InvalidParameter:
    return InvalidParameter(
        f"`starting_after` is {number}, but the last event of this response has the sequence number {last}. Pass at"
        f" most {last}, or remove it to receive all events.",
        param="starting_after",
    )


def _end(creation: Creation, generation: asyncio.Task[None]) -> tuple[Sequence[Event], ResponseObject]:
    try:
        generation.result()
        return creation.builder.finish()
    except asyncio.CancelledError:
        return creation.builder.cancel()
    except Exception as error:
        if not isinstance(error, DashInferVLMError):
            logger.exception("A response in the background failed.")
        return creation.builder.fail(error_body(error)["error"])
