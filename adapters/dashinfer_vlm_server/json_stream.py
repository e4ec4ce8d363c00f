"""Large JSON responses in slices, which are made when the client reads them and shared fairly among clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Mapping

from dashinfer_vlm_core.concurrency.fair_slots import FairSlots

SLICE_BYTES = 64 * 1024
"""Size of a slice, and of the write buffer from which on asyncio waits for the client."""


async def stream_json(value: object, *, slots: FairSlots, client: str) -> AsyncGenerator[bytes, None]:
    """Serialize a JSON value in slices, in a thread.

    A response that is not read costs no memory: strings are not copied, and the next slice waits for the client.

    Args:
        value: the value; it must not change.
        slots: shared by all streams; a slot is held while a slice is made.
        client: the id of the client.
    """
    slices = _slices(value)
    while True:
        async with slots.slot(client, limit=1):
            data = await asyncio.to_thread(next, slices, b"")
        if not data:
            return
        yield data


def _slices(value: object) -> Iterator[bytes]:
    """Join pieces until they have at least half the size of a slice."""
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
