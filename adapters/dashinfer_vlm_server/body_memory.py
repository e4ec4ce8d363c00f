"""The memory of request bodies, which clients share fairly."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial

import anyio

from dashinfer_vlm_core.errors import QueueFull
from dashinfer_vlm_core.protocol.client import current_client

WAIT_SECONDS = 5.0
"""How long a client that has less than its share waits for memory."""


class BodyMemory:
    """The memory of one request's body, from its reception to the end of the request.

    Args:
        budget: the limit on all bodies together.

    Attributes:
        client: the id of its client.
        size: the reserved bytes.
        scope: ends its reception.
        is_released: whether its request has ended: it gets no memory anymore, since nothing would release it.
    """

    def __init__(self, budget: BodyMemoryBudget, *, client: str = "") -> None:
        self.client = client
        self.size = 0
        self.scope = anyio.CancelScope()
        self.is_released = False
        self._budget = budget

    @contextlib.contextmanager
    def receiving(self) -> Iterator[Callable[[int], Awaitable[None]]]:
        """Receive the body, or a part of it, for its client; yields `BodyMemoryBudget.reserve` of this body.

        Other clients can take its memory until it is complete. Raises QueueFull if one did.
        """
        self.client = self.client or current_client.get().id
        self.scope = anyio.CancelScope()
        with self.scope, self._budget.receiving(self):
            yield partial(self._budget.reserve, self)
        if self.scope.cancel_called:
            raise _no_memory()

    def release(self) -> None:
        self._budget.release(self)

    def for_next_message(self) -> BodyMemory:
        """Return the memory of the next message of a WebSocket, if this is that of a message."""
        return BodyMemory(self._budget, client=self.client)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Waiter:
    """A body that waits for memory; the result of `granted` is whether it got it."""

    body: BodyMemory
    size: int
    granted: asyncio.Future[bool]


class BodyMemoryBudget:
    """A limit on the bodies of all requests together. Belongs to one event loop.

    A client can use all of it until others need memory. Then those that have less than an equal share get what becomes
    free, and bodies that are still being received are rejected, of clients that have more than their share. Bodies of
    one client that wait are served in order.

    Args:
        limit: the limit in bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used: Counter[str] = Counter()
        self._waiting: dict[str, deque[_Waiter]] = {}
        self._receiving: defaultdict[str, set[BodyMemory]] = defaultdict(set)

    async def reserve(self, body: BodyMemory, size: int) -> None:
        """Reserve bytes for a body; the client waits for them if it has less than its share.

        Raises:
            QueueFull: there are none for this client, or the body was released.
        """
        if self._take(body, size):
            return
        if body.is_released or not self._is_within_share(body.client, size):
            raise _no_memory()
        waiter = _Waiter(body=body, size=size, granted=asyncio.get_running_loop().create_future())
        self._enqueue(waiter)
        try:
            with anyio.move_on_after(WAIT_SECONDS):
                await waiter.granted
        finally:
            self._leave(waiter)
        if waiter.granted.cancelled() or not waiter.granted.result():
            raise _no_memory()

    def release(self, body: BodyMemory) -> None:
        """Release the memory of a body. Its client has no more of it."""
        body.is_released = True
        self._free(body)
        self._assign()

    @contextlib.contextmanager
    def receiving(self, body: BodyMemory) -> Iterator[None]:
        """Let other clients take the memory of a body."""
        self._receiving[body.client].add(body)
        try:
            yield
        finally:
            self._receiving[body.client].discard(body)
            if not self._receiving[body.client]:
                del self._receiving[body.client]

    def _enqueue(self, waiter: _Waiter) -> None:
        queue = self._waiting.setdefault(waiter.body.client, deque())
        queue.append(waiter)
        if len(queue) == 1:  # otherwise the first of them waits already, and nothing has changed for it
            self._assign()

    def _leave(self, waiter: _Waiter) -> None:
        waiter.granted.cancel()
        queue = self._waiting.get(waiter.body.client)
        if queue and queue[0] is waiter:
            self._assign()

    def _assign(self) -> None:
        for client in sorted(self._waiting, key=self._used.__getitem__):
            queue = self._waiting[client]
            while queue and self._is_decided(queue[0]):
                queue.popleft()
            if not queue:
                del self._waiting[client]

    def _is_decided(self, waiter: _Waiter) -> bool:
        """Whether a body gets its memory now, gets none, or does not wait anymore."""
        if waiter.granted.done():
            return True
        can_have_it = not waiter.body.is_released and self._is_within_share(waiter.body.client, waiter.size)
        if can_have_it:
            self._reject_larger(waiter.size)
            if not self._take(waiter.body, waiter.size):
                return False
        waiter.granted.set_result(can_have_it)
        return True

    def _take(self, body: BodyMemory, size: int) -> bool:
        if body.is_released:
            return False
        others_wait = bool(self._waiting.keys() - {body.client})
        if size > self._available or (others_wait and not self._is_within_share(body.client, size)):
            return False
        self._used[body.client] += size
        body.size += size
        return True

    def _free(self, body: BodyMemory) -> None:
        self._used[body.client] -= body.size
        if not self._used[body.client]:
            del self._used[body.client]
        body.size = 0

    def _reject_larger(self, size: int) -> None:
        if size <= self._available:
            return
        clients = [client for client in self._receiving if not self._is_within_share(client, 0)]
        bodies = [body for client in clients for body in self._receiving[client] if body.size]
        for body in sorted(bodies, key=lambda body: body.size, reverse=True):
            if size <= self._available:
                return
            if not self._is_within_share(body.client, 0):
                self._free(body)
                body.scope.cancel()

    def _is_within_share(self, client: str, size: int) -> bool:
        clients = {*self._used, *self._waiting, client}
        return self._used[client] + size <= self._limit // len(clients)

    @property
    def _available(self) -> int:
        return self._limit - self._used.total()


def _no_memory() -> QueueFull:
    return QueueFull("The server has no memory left for this request body. Try again later.")
