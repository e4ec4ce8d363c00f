"""The event loop thread: every reader gets all items of its stream in order, and the end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from dashinfer_vlm_core.concurrency.loop import LoopThread
from tests.waiting import HANG, until


@pytest.fixture
def thread():
    made = LoopThread("tested")
    yield made
    made.stop()


async def numbers(count):
    for number in range(count):
        await asyncio.sleep(0)
        yield number


def test_each_reader_gets_its_items_in_order_and_the_end(thread):
    async def read(count):
        return [number async for number in thread.aiterate(numbers(count))]

    async def read_all():
        return await asyncio.gather(*map(read, range(30)))

    assert asyncio.run(read_all()) == [list(range(count)) for count in range(30)]


def test_readers_on_different_loops_do_not_mix(thread):
    async def read(count):
        return [number async for number in thread.aiterate(numbers(count))]

    found = {}
    readers = [
        threading.Thread(target=lambda count=count: found.update({count: asyncio.run(read(count))}))
        for count in (100, 200, 300)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(timeout=HANG)
    assert found == {count: list(range(count)) for count in (100, 200, 300)}


def test_error_comes_after_items_before_it(thread):
    async def broken():
        yield 1
        raise KeyError("failed")

    async def read(found):
        async for item in thread.aiterate(broken()):
            found.append(item)

    found = []
    with pytest.raises(KeyError, match="failed"):
        asyncio.run(read(found))
    assert found == [1]


def test_reader_with_closed_loop_does_not_affect_others(thread):
    async def endless():
        while True:
            await asyncio.sleep(0.001)
            yield 0

    gone = asyncio.new_event_loop()
    left = thread.aiterate(endless())
    gone.run_until_complete(anext(left))
    gone.close()

    async def read():
        return [number async for number in thread.aiterate(numbers(200))]

    assert asyncio.run(read()) == list(range(200))
    with pytest.raises(StopIteration):
        left.aclose().send(None)
    until(lambda: not thread._tasks)


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts how often other threads wake it."""

    wakeups = 0

    def call_soon_threadsafe(self, *args, **options):
        self.wakeups += 1
        return super().call_soon_threadsafe(*args, **options)


def test_items_of_one_iteration_wake_their_loop_once(thread):
    started, go = [], asyncio.Event()

    async def item():
        started.append(1)
        await go.wait()
        yield 1

    async def release():
        go.set()

    async def read():
        return [number async for number in thread.aiterate(item())]

    async def read_all():
        reading = asyncio.gather(*(read() for _ in range(30)))
        await asyncio.sleep(0)
        await asyncio.to_thread(until, lambda: len(started) == 30)
        before = loop.wakeups
        await thread.acall(release())
        items = await reading
        return items, loop.wakeups - before

    loop = CountingLoop()
    try:
        items, wakeups = loop.run_until_complete(read_all())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()
    assert items == [[1]] * 30
    assert wakeups < 10  # the items, the ends, and `acall`


def test_stop_starts_no_thread(monkeypatch):
    """Since Python 3.12, no thread can be started during interpreter shutdown, when shared engines are closed."""
    thread, started, start = LoopThread("tested"), [], threading.Thread.start
    thread.call(asyncio.to_thread(int))

    def record(self):
        started.append(self.name)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", record)
    thread.stop()
    assert started == []
