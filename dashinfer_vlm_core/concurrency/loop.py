"""An event loop in a thread of its own: how callers of any thread and any event loop reach the engine's stages."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any, TypeVar

from ..errors import EngineClosed

T = TypeVar("T")
_END = object()


class LoopThread:
    """Runs coroutines for other threads until it is stopped."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._executor = concurrent.futures.ThreadPoolExecutor(thread_name_prefix=name)
        self._loop.set_default_executor(self._executor)
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._stopping = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lock = threading.Lock()
        self._thread.start()

    def stop(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """End what still runs with EngineClosed, run `last`, and end the thread, whatever `last` raises."""
        with self._lock:
            self._stopping = True
        try:
            asyncio.run_coroutine_threadsafe(self._finish(last), self._loop).result()
        finally:
            # Not by asyncio's shutdown_default_executor, which starts a thread: since Python 3.12 that fails while the
            # interpreter shuts down, when shared engines are closed.
            self._executor.shutdown()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` and wait for it, blocking the caller's thread."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:  # Ctrl-C in the caller's thread must not leave the work running
            future.cancel()
            raise

    async def acall(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` and wait for it on the caller's own event loop; cancelling the caller cancels the work."""
        return await asyncio.wrap_future(self.submit(work))

    def iterate(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """The items of an async generator, one by one; closing this iterator closes the generator."""
        arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        future = self._pour(items, arrived.put)
        try:
            while (item := arrived.get()) is not _END:
                yield item
            future.result()
        finally:
            future.cancel()

    async def aiterate(self, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """As `iterate`, for callers on an event loop of their own."""
        caller = asyncio.get_running_loop()
        arrived: asyncio.Queue[Any] = asyncio.Queue()

        def put(item: object) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody is left to read
                caller.call_soon_threadsafe(arrived.put_nowait, item)

        future = self._pour(items, put)
        try:
            while (item := await arrived.get()) is not _END:
                yield item
            future.result()
        finally:
            future.cancel()

    def _pour(self, items: AsyncGenerator[T, None], put: Callable[[object], None]) -> concurrent.futures.Future[None]:
        """Hand over each item, and then the end, however it came."""
        future = self.submit(_drain(items, put))
        future.add_done_callback(lambda _: put(_END))
        return future

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begin to run `work`; cancelling the future cancels it."""
        with self._lock:  # either the loop still takes it, or it is told so: nothing is left in between for ever
            if self._stopping:
                work.close()
                raise closed()
            return asyncio.run_coroutine_threadsafe(self._run(work), self._loop)

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if self._stopping:  # not the caller has left: the engine has
                raise closed() from None
            raise
        finally:
            self._tasks.discard(task)

    async def _finish(self, last: Coroutine[Any, Any, None] | None) -> None:
        await asyncio.sleep(0)  # what was submitted a moment ago begins, and so can end in an orderly way
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            if last is not None:
                await last
        finally:
            await self._loop.shutdown_asyncgens()


def closed() -> EngineClosed:
    return EngineClosed(
        "The engine is not running: use it inside `with Engine(...)`, or call start() first.", to_be_started=True
    )


async def _drain(items: AsyncGenerator[T, None], put: Callable[[object], None]) -> None:
    async with contextlib.aclosing(items) as opened:
        async for item in opened:
            put(item)
