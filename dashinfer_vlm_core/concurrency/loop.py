"""An event loop in its own thread, through which callers in any thread or event loop run the engine's stages."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from typing import Any, TypeVar

from ..errors import EngineClosed

T = TypeVar("T")
_END = object()


class _Outbox:
    """Passes items to readers on other event loops, with one wake-up per loop for all items of an iteration: each
    wake-up costs a system call and a switch between threads. Belongs to one event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue[Any], object]]] = {}

    def put(self, reader: asyncio.AbstractEventLoop, queue: asyncio.Queue[Any], item: object) -> None:
        if not self._items:
            self._loop.call_soon(self._send)
        self._items.setdefault(reader, []).append((queue, item))

    def _send(self) -> None:
        items = self._items
        self._items = {}
        for reader, batch in items.items():
            with contextlib.suppress(RuntimeError):  # the reader's loop is closed
                reader.call_soon_threadsafe(put_all, batch)


def put_all(items: Sequence[tuple[asyncio.Queue[Any], object]]) -> None:
    """Put each item into its queue."""
    for received, item in items:
        received.put_nowait(item)


class LoopThread:
    """An event loop in its own thread, which runs coroutines for other threads until it is stopped."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._outbox = _Outbox(self._loop)
        self._executor = concurrent.futures.ThreadPoolExecutor(thread_name_prefix=name)
        self._loop.set_default_executor(self._executor)
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._stopping = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lock = threading.Lock()
        self._thread.start()

    def stop(self, cleanup: Coroutine[Any, Any, None] | None = None) -> None:
        """Cancel running work, which raises EngineClosed, run `cleanup`, and end the thread even if that raises."""
        with self._lock:
            self._stopping = True
        try:
            asyncio.run_coroutine_threadsafe(self._finish(cleanup), self._loop).result()
        finally:
            # asyncio's shutdown_default_executor starts a thread. Since Python 3.12 this fails while the interpreter
            # shuts down, which is when shared engines are closed.
            self._executor.shutdown()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` and block the calling thread until it completes."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:  # Ctrl-C in the caller's thread must not leave the work running
            future.cancel()
            raise
        finally:
            del future  # its exception refers to this frame: the cycle would keep the request

    async def acall(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` and await it on the caller's event loop; canceling the caller cancels `work`."""
        return await asyncio.wrap_future(self.submit(work))

    def iterate(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Yield the items of an async generator; closing this iterator closes the generator."""
        received: queue.SimpleQueue[Any] = queue.SimpleQueue()
        future = self._forward(items, received.put)
        try:
            while (item := received.get()) is not _END:
                yield item
            future.result()
        finally:
            future.cancel()

    async def aiterate(self, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Like `iterate`, for callers on another event loop."""
        caller = asyncio.get_running_loop()
        received: asyncio.Queue[Any] = asyncio.Queue()

        def put(item: object) -> None:
            if threading.current_thread() is self._thread:
                self._outbox.put(caller, received, item)
            else:  # the end, if the stream has already ended: all items were passed before that
                with contextlib.suppress(RuntimeError):  # the caller's loop is closed
                    caller.call_soon_threadsafe(received.put_nowait, item)

        future = self._forward(items, put)
        try:
            while (item := await received.get()) is not _END:
                yield item
            future.result()
        finally:
            future.cancel()

    def _forward(
        self, items: AsyncGenerator[T, None], put: Callable[[object], None]
    ) -> concurrent.futures.Future[None]:
        future = self.submit(_forward_items(items, put))
        future.add_done_callback(lambda _: put(_END))
        return future

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Schedule `work`; canceling the future cancels it."""
        with self._lock:  # work is either scheduled or rejected, so that no caller waits forever
            if self._stopping:
                work.close()
                raise engine_closed()
            return asyncio.run_coroutine_threadsafe(self._run(work), self._loop)

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if self._stopping:  # the engine was closed; the caller did not cancel
                raise engine_closed() from None
            raise
        finally:
            self._tasks.discard(task)
            del task  # its exception refers to this frame: the cycle would keep the request

    async def _finish(self, cleanup: Coroutine[Any, Any, None] | None) -> None:
        await asyncio.sleep(0)  # start what was just submitted, so that its cancellation runs its cleanup
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            if cleanup is not None:
                await cleanup
        finally:
            await self._loop.shutdown_asyncgens()


def engine_closed() -> EngineClosed:
    return EngineClosed(
        "The engine is not running. Use it inside `with Engine(...)`, or call start() first.", to_be_started=True
    )


async def _forward_items(items: AsyncGenerator[T, None], put: Callable[[object], None]) -> None:
    async with contextlib.aclosing(items) as opened:
        async for item in opened:
            put(item)
