from __future__ import annotations

import asyncio
import contextlib

import pytest

from dashinfer_vlm_core.deadline import stream_within, within
from dashinfer_vlm_core.errors import DeadlineExceeded, QueueFull


async def numbers(closed, *pauses):
    try:
        for index, pause in enumerate(pauses):
            await asyncio.sleep(pause)
            yield index
    finally:
        closed.append(True)


async def collect(stream):
    return [item async for item in stream]


async def pour(stream, items):
    async for item in stream:
        items.append(item)


@pytest.mark.parametrize("seconds", [None, 60])
def test_what_is_there_in_time_is_handed_on(seconds):
    async def main():
        closed = []
        assert await within(asyncio.sleep(0, "done"), seconds) == "done"
        assert await collect(stream_within(numbers(closed, 0, 0), seconds=seconds, first=seconds)) == [0, 1]
        assert closed

    asyncio.run(main())


def test_what_takes_too_long_is_cancelled():
    async def main():
        cancelled = asyncio.Event()

        async def work():
            try:
                await asyncio.sleep(60)
            finally:
                cancelled.set()

        with pytest.raises(DeadlineExceeded, match=r"0\.01 seconds"):
            await within(work(), 0.01)
        assert cancelled.is_set()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("pauses", "limits", "expected"),
    [
        ((60,), {"seconds": 0.01, "first": None}, []),
        ((60,), {"seconds": None, "first": 0.01}, []),
        ((60,), {"seconds": 60, "first": 0.01}, []),
        ((0, 60), {"seconds": 0.05, "first": 60}, [0]),
        ((0, 0.3, 60), {"seconds": 1.0, "first": 0.1}, [0, 1]),
    ],
)
def test_a_stream_is_closed_at_its_deadline(pauses, limits, expected):
    async def main():
        closed, items = [], []
        with pytest.raises(DeadlineExceeded):
            await pour(stream_within(numbers(closed, *pauses), **limits), items)
        assert closed
        assert items == expected

    asyncio.run(main())


def test_errors_pass():
    async def fail():
        raise QueueFull("Busy.")

    async def main():
        with pytest.raises(QueueFull):
            await within(fail(), 60)

    asyncio.run(main())


@pytest.mark.parametrize("turns", range(6))
def test_a_reader_that_is_cancelled_as_an_item_comes_leaves_nothing_running(turns):
    """Whichever of the two is first."""

    async def main():
        closed, arrived = [], asyncio.Queue()

        async def items():
            try:
                while True:
                    yield await arrived.get()
            finally:
                closed.append(True)

        reader = asyncio.create_task(collect(stream_within(items(), seconds=60, first=None)))
        await asyncio.sleep(0)
        arrived.put_nowait("item")
        for _ in range(turns):
            await asyncio.sleep(0)
        reader.cancel()
        await asyncio.wait({reader}, timeout=5)
        assert reader.cancelled()
        assert closed

    asyncio.run(main())


def test_leaving_a_stream_closes_it():
    async def main():
        closed = []
        async with contextlib.aclosing(stream_within(numbers(closed, 0, 60), seconds=None, first=None)) as stream:
            await anext(stream)
        assert closed

    asyncio.run(main())
