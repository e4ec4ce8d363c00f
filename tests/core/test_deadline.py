from __future__ import annotations

import asyncio
import contextlib
import math

import pytest

from dashinfer_vlm_core.concurrency.deadline import stream_with_timeout, with_timeout
from dashinfer_vlm_core.errors import DeadlineExceeded, QueueFull
from tests.cases import cases
from tests.clock import run, skippable_loop
from tests.waiting import HANG

NEVER = math.inf


async def numbers(closed, *pauses):
    """Yield numbers, each after a pause in seconds; a deadline during a pause ends the stream there."""
    try:
        for index, pause in enumerate(pauses):
            await (skippable_loop().askip(pause) if pause < NEVER else asyncio.Event().wait())
            yield index
    finally:
        closed.append(True)


async def collect(stream):
    return [item async for item in stream]


async def pour(stream, items):
    async for item in stream:
        items.append(item)


@pytest.mark.parametrize("seconds", [None, HANG])
def test_items_before_deadline_are_yielded(seconds):
    async def main():
        closed = []
        assert await with_timeout(asyncio.sleep(0, "done"), seconds) == "done"
        assert await collect(stream_with_timeout(numbers(closed, 0, 0), seconds=seconds, first=seconds)) == [0, 1]
        assert closed

    run(main())


def test_slow_work_is_canceled():
    async def main():
        canceled = asyncio.Event()

        async def work():
            try:
                await skippable_loop().askip(601)
                await asyncio.Event().wait()
            finally:
                canceled.set()

        with pytest.raises(DeadlineExceeded, match=r"600 seconds"):
            await with_timeout(work(), 600)
        assert canceled.is_set()

    run(main())


@pytest.mark.parametrize(
    ("pauses", "limits", "expected"),
    [
        ((601, NEVER), {"seconds": 600, "first": None}, []),
        ((601, NEVER), {"seconds": None, "first": 600}, []),
        ((601, NEVER), {"seconds": 6000, "first": 600}, []),
        ((0, 601, NEVER), {"seconds": 600, "first": 6000}, [0]),
        ((0, 3000, 3000, 1000, NEVER), {"seconds": 6500, "first": 1000}, [0, 1, 2]),
    ],
)
def test_stream_is_closed_at_deadline(pauses, limits, expected):
    async def main():
        closed, items = [], []
        with pytest.raises(DeadlineExceeded):
            await pour(stream_with_timeout(numbers(closed, *pauses), **limits), items)
        assert closed
        assert items == expected

    run(main())


@cases("error", [QueueFull("Busy."), TimeoutError("The disk does not respond.")])
def test_errors_are_propagated(error):
    async def fail():
        raise error

    async def stream():
        yield await fail()

    async def main():
        for seconds in (None, HANG):
            limited = stream_with_timeout(stream(), seconds=seconds, first=None)
            for work in (with_timeout(fail(), seconds), collect(limited)):
                with pytest.raises(type(error), match=str(error)):
                    await work

    asyncio.run(main())


@cases("turns", range(6))
def test_reader_canceled_as_item_arrives_leaves_no_task(turns):
    """Whichever of the two comes first."""

    async def main():
        closed, arrived = [], asyncio.Queue()

        async def items():
            try:
                while True:
                    yield await arrived.get()
            finally:
                closed.append(True)

        reader = asyncio.create_task(collect(stream_with_timeout(items(), seconds=60, first=None)))
        await asyncio.sleep(0)
        arrived.put_nowait("item")
        for _ in range(turns):
            await asyncio.sleep(0)
        reader.cancel()
        await asyncio.wait({reader}, timeout=HANG)
        assert reader.cancelled()
        assert closed

    asyncio.run(main())


def test_leaving_stream_closes_it():
    async def main():
        closed = []
        async with contextlib.aclosing(
            stream_with_timeout(numbers(closed, 0, NEVER), seconds=None, first=None)
        ) as stream:
            await anext(stream)
        assert closed

    run(main())
