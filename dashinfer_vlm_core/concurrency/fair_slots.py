"""FairSlots: a limited number of slots, shared fairly among clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator


class FairSlots:
    """Slots for concurrent work. Belongs to one event loop.

    A free slot goes to the waiting client with the fewest slots, and among equals to the one that waits longest.
    Requests of one client are served in order.

    Args:
        limit: number of slots.
    """

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._used: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[tuple[asyncio.Future[None], int]]] = OrderedDict()  # with their limits

    @property
    def waiting(self) -> int:
        """How many requests wait for a slot."""
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
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append((turn, limit))
        self._assign()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(client)
            raise

    def _release(self, client: str) -> None:
        self._free += 1
        self._used[client] -= 1
        if not self._used[client]:
            del self._used[client]
        self._assign()

    def _assign(self) -> None:
        while self._free and (client := self._next_client()) is not None:
            turns = self._waiting[client]
            turn, _ = turns.popleft()
            if turns:
                self._waiting.move_to_end(client)
            else:
                del self._waiting[client]
            if not turn.cancelled():
                self._free -= 1
                self._used[client] += 1
                turn.set_result(None)

    def _next_client(self) -> str | None:
        eligible = (client for client, turns in self._waiting.items() if self._used[client] < turns[0][1])
        return min(eligible, key=self._used.__getitem__, default=None)
