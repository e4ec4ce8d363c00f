"""FairSlots: a limited number of slots, shared fairly among clients."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator


class _Turn:
    """A request for a slot, which waits on its own event loop.

    Attributes:
        limit: how many slots its client may use at once.
        is_granted: whether it has the slot.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.is_granted = False
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._granted: asyncio.Future[None] = self._loop.create_future()

    async def wait(self) -> None:
        await self._granted

    def grant(self) -> None:
        self.is_granted = True
        if threading.get_ident() == self._thread:
            self._wake()
        else:
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if not self._granted.done():
            self._granted.set_result(None)


class FairSlots:
    """Slots for concurrent work on one or several event loops.

    A free slot goes to the waiting client with the fewest slots, and among equals to the one that waits longest.
    Requests of one client are served in order.

    Args:
        limit: number of slots.
    """

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._used: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[_Turn]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """How many requests wait for a slot."""
        with self._lock:
            return sum(map(len, self._waiting.values()))

    @contextlib.asynccontextmanager
    async def slot(self, client: str, *, limit: int) -> AsyncIterator[None]:
        """Wait for a slot, and release it on exit.

        Args:
            client: who uses the slot.
            limit: how many slots the client may use at once, at least 1.
        """
        await self._acquire(client, limit)
        try:
            yield
        finally:
            self._release(client)

    async def _acquire(self, client: str, limit: int) -> None:
        turn = _Turn(limit)
        with self._lock:
            self._waiting.setdefault(client, deque()).append(turn)
            self._assign()
        try:
            await turn.wait()
        except asyncio.CancelledError:
            if not self._withdraw(client, turn):
                self._release(client)
            raise

    def _withdraw(self, client: str, turn: _Turn) -> bool:
        """Stop waiting, unless the slot is granted already. Return whether it is not."""
        with self._lock:
            if turn.is_granted:
                return False
            turns = self._waiting[client]
            turns.remove(turn)
            if not turns:
                del self._waiting[client]
            self._assign()  # the client's next request may have a higher limit
            return True

    def _release(self, client: str) -> None:
        with self._lock:
            self._free += 1
            self._used[client] -= 1
            if not self._used[client]:
                del self._used[client]
            self._assign()

    def _assign(self) -> None:
        while self._free and (client := self._next_client()) is not None:
            turns = self._waiting[client]
            turn = turns.popleft()
            if turns:
                self._waiting.move_to_end(client)
            else:
                del self._waiting[client]
            self._free -= 1
            self._used[client] += 1
            turn.grant()

    def _next_client(self) -> str | None:
        eligible = (client for client, turns in self._waiting.items() if self._used[client] < turns[0].limit)
        return min(eligible, key=self._used.__getitem__, default=None)
