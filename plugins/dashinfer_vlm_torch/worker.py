"""The thread that has step after step computed, and hands tokens to whatever event loops their readers live in."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from dashinfer_vlm_core.concurrency.compute import CPU_EXECUTOR
from dashinfer_vlm_core.decoders import Token
from dashinfer_vlm_core.errors import DecoderFailed, EngineClosed, EngineError

from .runner import ModelRunner
from .scheduler import Outcome, ScheduledChunk, Scheduler, SchedulerOutput, SchedulerStats, SequenceState

logger: logging.Logger = logging.getLogger(__name__)

Reply: TypeAlias = Token | EngineError

STOP_SECONDS = 10.0
"""How long the step that is under way may go on when the worker is stopped."""


class OutputQueue(NamedTuple):
    """Where a reader waits: a queue, and the event loop that it belongs to."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Reply]


class WorkerCounts(NamedTuple):
    """What a worker has done; as in `DecoderStats`."""

    steps: int = 0
    step_requests: int = 0
    started: int = 0
    queue_seconds: float = 0.0


class Worker:
    """Has the model run, and waits for it in a thread of its own; all methods may be called from any thread.

    `_lock` guards the scheduler, the mailboxes and what is counted. It is never held while the model runs.

    Args:
        runner: runs the model.
        scheduler: says what each step does.
        step_timeout: seconds after which a step counts as hung.
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, *, step_timeout: float) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._step_timeout = step_timeout
        self._step_began = math.inf
        self._counts = WorkerCounts()
        self._queued: dict[SequenceState, float] = {}
        self._outputs: dict[SequenceState, OutputQueue] = {}
        self._lock = threading.Condition()
        self._ended: type[EngineError] | None = None
        self._thread = threading.Thread(target=self._work, name="dashinfer-vlm-torch-decoder", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> SchedulerStats:
        with self._lock:
            return self._scheduler.stats

    @property
    def counts(self) -> WorkerCounts:
        with self._lock:
            return self._counts

    @property
    def fatal_error(self) -> str:
        """Why nothing is decoded any more, though nobody has stopped the worker; empty while something is."""
        with self._lock:
            if self._ended is DecoderFailed:
                return _ENDED
            hung = time.monotonic() - self._step_began > self._step_timeout
        return f"A step of the decoder has taken more than {self._step_timeout:g} seconds." if hung else ""

    def submit(self, run: SequenceState, output_queue: OutputQueue) -> None:
        """Queue a run; its tokens, or the error that ends it, arrive in the mailbox.

        Raises:
            QueueFull: `max_waiting` requests wait already.
            EngineClosed: the worker was stopped.
            DecoderFailed: the worker died.
        """
        with self._lock:
            if self._ended:
                raise self._ended(_ENDED)
            self._scheduler.add(run)
            self._outputs[run] = output_queue
            self._queued[run] = time.monotonic()
            self._lock.notify()

    def cancel(self, run: SequenceState) -> None:
        """Forget a run and free what it held; one that has ended already is no error."""
        with self._lock:
            self._queued.pop(run, None)
            if self._outputs.pop(run, None):
                self._scheduler.remove(run)

    def stop(self) -> None:
        """End all runs with EngineClosed, after the step that is under way.

        Raises:
            DecoderFailed: that step does not end soon.
        """
        with self._lock:
            self._ended = self._ended or EngineClosed
            self._lock.notify()
        seconds = min(STOP_SECONDS, self._step_timeout)
        self._thread.join(timeout=seconds)
        if self._thread.is_alive():
            CPU_EXECUTOR.take_from(self._thread.ident)  # a tower that waits for it goes on, and can be closed
            self._end_all()
            raise DecoderFailed(
                f"A step of the decoder has not ended within {seconds:g} seconds. It ends with the process at last:"
                " start that anew."
            )

    def _work(self) -> None:
        try:
            while step := self._next_step():
                self._finish_step(step.chunks, self._runner.compute(functools.partial(self._take, step)))
        except Exception:
            logger.exception("The decoder's thread died; every request fails until the engine is started again.")
        finally:
            self._end_all()

    def _next_step(self) -> SchedulerOutput | None:
        """What to do next, after waiting for something to do; None if the worker was stopped."""
        with self._lock:
            self._lock.wait_for(lambda: self._ended or self._scheduler.busy)
            if self._ended:
                return None
            step = self._scheduler.schedule()
            self._count(step.chunks)
            return step

    def _count(self, chunks: Sequence[ScheduledChunk]) -> None:
        self._step_began = now = time.monotonic()
        arrivals = [self._queued.pop(chunk.sequence) for chunk in chunks if chunk.sequence in self._queued]
        steps, step_requests, started, queue_seconds = self._counts
        self._counts = WorkerCounts(
            steps=steps + 1,
            step_requests=step_requests + len(chunks),
            started=started + len(arrivals),
            queue_seconds=queue_seconds + sum(now - arrival for arrival in arrivals),
        )

    def _take(self, step: SchedulerOutput) -> dict[SequenceState, Outcome]:
        self._runner.copy_rows(step.copies)
        return self._attempt(step.chunks)

    def _attempt(self, chunks: Sequence[ScheduledChunk]) -> dict[SequenceState, Outcome]:
        """Run a step; should it fail, run each of its chunks alone, so that only the one to blame fails.

        Raises:
            RuntimeError: the device is lost, so that no request can be computed any more.
        """
        try:
            return self._runner.step(chunks)
        except Exception:
            if len(chunks) == 1:
                self._runner.check_device()
                run = chunks[0].sequence
                logger.exception("Request %s failed in the decoder.", run.request.id)
                return {run: DecoderFailed("The decoder failed on this request; the engine's log has the cause.")}
            logger.warning("A step of %d requests failed; each is tried alone.", len(chunks), exc_info=True)
            return {run: choice for chunk in chunks for run, choice in self._attempt([chunk]).items()}

    def _finish_step(self, chunks: Sequence[ScheduledChunk], choices: dict[SequenceState, Outcome]) -> None:
        with self._lock:
            self._step_began = math.inf
            replies = self._scheduler.update(chunks, choices)
            posts = [(self._outputs[run], reply) for run, reply in replies]
            for run, reply in replies:
                if isinstance(reply, EngineError) or reply.finish_reason:
                    del self._outputs[run]
        self._deliver(posts)

    def _end_all(self) -> None:
        with self._lock:
            self._ended = error = self._ended or DecoderFailed
            self._scheduler.clear()
            posts: list[tuple[OutputQueue, Reply]] = [
                (output_queue, error(_ENDED)) for output_queue in self._outputs.values()
            ]
            self._outputs.clear()
            self._queued.clear()
        self._deliver(posts)

    def _deliver(self, posts: Sequence[tuple[OutputQueue, Reply]]) -> None:
        """Wake each event loop once, however many of its readers get something."""
        by_loop = defaultdict(list)
        for output_queue, reply in posts:
            by_loop[output_queue.loop].append((output_queue, reply))
        for loop, mail in by_loop.items():
            self._post_to_loop(loop, mail)

    def _post_to_loop(self, loop: asyncio.AbstractEventLoop, mail: Sequence[tuple[OutputQueue, Reply]]) -> None:
        try:
            loop.call_soon_threadsafe(_put_all, mail)
        except RuntimeError:  # the loop was closed under its readers
            with self._lock:
                sequences = [run for run, output_queue in self._outputs.items() if output_queue.loop is loop]
            for run in sequences:
                self.cancel(run)


_ENDED = "The decoder has stopped. Start the engine again."


def _put_all(mail: Sequence[tuple[OutputQueue, Reply]]) -> None:
    for output_queue, reply in mail:
        output_queue.queue.put_nowait(reply)
