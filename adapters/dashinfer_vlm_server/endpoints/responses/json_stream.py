"""Large JSON responses in slices, which are made when the client reads them and shared fairly among clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import TYPE_CHECKING

from fastapi.responses import StreamingResponse

from dashinfer_vlm_core.concurrency.fair_slots import FairSlots

from ...request_context import SLICE_BYTES
from ...sse import Discarded

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send


class JsonStream(StreamingResponse):
    """A large JSON value as a response, in slices that are made in a thread.

    A response that is not read costs no memory: strings are not copied, and the next slice waits for the client.

    Args:
        value: the value; it must not change.
        slots: shared by all streams; a slot is held while a slice is made.
        client: the id of the client.
    """

    media_type = "application/json"

    def __init__(self, value: object, *, slots: FairSlots, client: str) -> None:
        super().__init__(self._read(slots, client))
        self._slices: Iterator[bytes] | None = _slices(value)

    def discard(self) -> None:
        """Release the value; the connection is closed before the response is complete. Safe to call in any thread."""
        self._slices = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(Discarded):
            await super().__call__(scope, receive, send)

    async def _read(self, slots: FairSlots, client: str) -> AsyncGenerator[bytes, None]:
        while True:
            async with slots.slot(client, limit=1):
                data = await asyncio.to_thread(self._next_slice)
            if not data:
                return
            yield data

    def _next_slice(self) -> bytes:
        if self._slices is None:
            raise Discarded
        return next(self._slices, b"")


def _slices(value: object) -> Iterator[bytes]:
    joined = bytearray()
    for piece in _pieces(value):
        joined += piece.encode("utf-8", "backslashreplace")  # lone surrogates, as in JSON
        if len(joined) >= SLICE_BYTES // 2:
            yield bytes(joined)
            joined.clear()
    yield bytes(joined)


def _pieces(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield '"'
        for start in range(0, len(value), SLICE_BYTES // 2):
            yield json.dumps(value[start : start + SLICE_BYTES // 2], ensure_ascii=False)[1:-1]
        yield '"'
    elif isinstance(value, Mapping):
        for index, (key, item) in enumerate(value.items()):
            yield f"{',' if index else '{'}{json.dumps(key, ensure_ascii=False)}:"
            yield from _pieces(item)
        yield "}" if value else "{}"
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield "," if index else "["
            yield from _pieces(item)
        yield "]" if value else "[]"
    else:
        yield json.dumps(value)
