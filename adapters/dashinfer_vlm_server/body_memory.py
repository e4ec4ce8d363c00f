"""The memory of request bodies, which clients share fairly."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator

import anyio

from dashinfer_vlm_core.errors import QueueFull
from dashinfer_vlm_core.protocol.client import current_client

WAIT_SECONDS = 5.0
"""How long a client that has less than its share waits for memory."""


class BodyMemoryBudget:
    """A limit on the bodies of all requests together. Belongs to one event loop.

    A client can use all of it until others need memory. Then those that have less than an equal share get what becomes
    free, and bodies that are still being received are rejected, of clients that have more than their share.

    Args:
        limit: the limit in bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self._receiving: set[BodyMemory] = set()
        self._changed = asyncio.Event()

    async def reserve(self, body: BodyMemory, size: int) -> None:
        """Reserve bytes for a body; the client waits for them if it has less than its share.

        Raises:
            QueueFull: there are none for this client.
        """
        if self._take(body, size):
            return
        self._waiting[body.client] += 1
        try:
            with anyio.move_on_after(WAIT_SECONDS):
                while self._is_within_share(body.client, size):
                    self._reject_larger(size)
                    if self._take(body, size):
                        return
                    await self._changed.wait()
        finally:
            _subtract(self._waiting, body.client, 1)
            self._notify()
        raise _no_memory()

    def release(self, body: BodyMemory) -> None:
        """Release the memory of a body. Its client has no more of it."""
        _subtract(self._used, body.client, body.size)
        body.size = 0
        self._notify()

    @contextlib.contextmanager
    def receiving(self, body: BodyMemory) -> Iterator[None]:
        """Let other clients take the memory of a body until it is complete. Raises QueueFull if one did."""
        with anyio.CancelScope() as scope:
            body.scope = scope
            self._receiving.add(body)
            try:
                yield
            finally:
                self._receiving.discard(body)
        if scope.cancel_called:
            raise _no_memory()

    def _take(self, body: BodyMemory, size: int) -> bool:
        others_wait = bool(self._waiting.keys() - {body.client})
        if size > self._available or (others_wait and not self._is_within_share(body.client, size)):
            return False
        self._used[body.client] += size
        body.size += size
        return True

    def _reject_larger(self, size: int) -> None:
        """Reject incomplete bodies, the largest first, of clients that have more than their share."""
        while size > self._available:
            bodies = [body for body in self._receiving if not self._is_within_share(body.client, 0)]
            if not bodies:
                return
            largest = max(bodies, key=lambda body: body.size)
            self._receiving.discard(largest)
            self.release(largest)
            largest.scope.cancel()

    def _is_within_share(self, client: str, size: int) -> bool:
        """Whether a client that gets `size` bytes more has at most an equal share."""
        clients = {*self._used, *self._waiting, client}
        return self._used[client] + size <= self._limit // len(clients)

    @property
    def _available(self) -> int:
        return self._limit - self._used.total()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class BodyMemory:
    """The memory of one request's body.

    Attributes:
        client: the id of its client.
        size: the reserved bytes.
        scope: ends its reception.
    """

    def __init__(self, budget: BodyMemoryBudget) -> None:
        self._budget = budget
        self.client = ""
        self.size = 0
        self.scope = anyio.CancelScope()

    async def reserve(self, size: int) -> None:
        """Reserve memory for received bytes. Raises as `BodyMemoryBudget.reserve`."""
        await self._budget.reserve(self, size)

    @contextlib.contextmanager
    def receiving(self) -> Iterator[None]:
        """Receive the body, for the current client. Raises as `BodyMemoryBudget.receiving`."""
        self.client = current_client.get().id
        with self._budget.receiving(self):
            yield

    def release(self) -> None:
        self._budget.release(self)


def _subtract(counter: Counter[str], client: str, amount: int) -> None:
    counter[client] -= amount
    if not counter[client]:
        del counter[client]


def _no_memory() -> QueueFull:
    return QueueFull("The server has no memory left for this request body. Try again later.")
