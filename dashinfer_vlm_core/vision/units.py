"""Units of the vision encoder: what is encoded once, and cached by its content."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ..concurrency.compute import executor_for
from ..concurrency.loop import engine_closed
from ..errors import EngineClosed, EngineError
from ..models.interface import Patches, VisionEncoder
from ..protocol.client import current_client

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, eq=False)
class UnitJob:
    """One unit to encode, shared by all callers that wait for it.

    Attributes:
        key: cache key.
        patches: the unit.
        encoder: the encoder to use.
        stored_digest: what identifies its embedding in the store: the salted digest, and the adapter if there is one.
        item_tokens: visual tokens of the whole image or video.
        callers: number of waiting callers.
        started: whether it is looked up, queued, encoded or finished.
        client: the client of the request that needed it first.
    """

    key: bytes
    patches: Patches
    encoder: VisionEncoder
    stored_digest: bytes
    item_tokens: int
    callers: int = 0
    started: bool = False
    client: str = field(default_factory=lambda: current_client.get().id)
    _done: asyncio.Event = field(default_factory=asyncio.Event)
    _outcome: torch.Tensor | Exception | None = None

    @property
    def size(self) -> int:
        """Number of patches."""
        return self.patches.grid.patches

    def item_bytes(self, embedding: torch.Tensor) -> int:
        """Return the memory of the whole item."""
        return size_of(embedding) * self.item_tokens // self.patches.tokens

    def finish(self, outcome: torch.Tensor | Exception) -> None:
        self._outcome = outcome
        self._done.set()

    async def embedding(self, path: str) -> torch.Tensor:
        """Wait for the result; `path` is the item's location in the caller's request, used in errors."""
        await self._done.wait()
        assert self._outcome is not None
        if isinstance(self._outcome, EngineClosed):
            raise engine_closed()
        if isinstance(self._outcome, Exception):
            message = "The vision encoder failed on this image or video. Try again; the engine's log has the cause."
            raise EngineError(message, param=path, code="vision_failed") from self._outcome
        return self._outcome


class UnitQueue:
    """The units that wait for the encoder. Clients take turns; those of one client are in order."""

    def __init__(self) -> None:
        self._of_clients: OrderedDict[str, dict[bytes, UnitJob]] = OrderedDict()

    @property
    def next(self) -> UnitJob | None:
        """The unit whose turn it is."""
        return next((next(iter(queue.values())) for queue in self._of_clients.values()), None)

    def add(self, job: UnitJob) -> None:
        self._of_clients.setdefault(job.client, {})[job.key] = job

    def take(self, job: UnitJob) -> None:
        """Remove a unit, and give the turn to the next client."""
        self.discard(job)
        if job.client in self._of_clients:
            self._of_clients.move_to_end(job.client)

    def discard(self, job: UnitJob) -> bool:
        """Remove a unit; return whether it was waiting."""
        queue = self._of_clients.get(job.client, {})
        if queue.get(job.key) is not job:
            return False
        del queue[job.key]
        if not queue:
            del self._of_clients[job.client]
        return True


def concatenate(units: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join embeddings, where models compute: copies on another thread would start a second team of OpenMP's threads."""
    return executor_for(str(units[0].device)).run(partial(_concatenate, units))


def _concatenate(units: Sequence[torch.Tensor]) -> torch.Tensor:
    joined = units[0].new_empty((sum(map(len, units)), units[0].shape[1]))
    row = 0
    for unit in units:
        joined[row : row + len(unit)] = unit
        row += len(unit)
    return joined


def size_of(embedding: torch.Tensor) -> int:
    return embedding.element_size() * embedding.numel()
