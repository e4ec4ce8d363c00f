"""The thread that runs the scheduler's steps and delivers tokens to the event loop of their readers."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from dashinfer_vlm_core.concurrency.loop import put_all
from dashinfer_vlm_core.decoders import DecoderStats, Pooled, Token
from dashinfer_vlm_core.decoders.interface import RequestNotStarted
from dashinfer_vlm_core.errors import DecoderFailed, EngineClosed, EngineError

from .runner import LaunchedStep, ModelRunner
from .scheduler import Outcome, Scheduler
from .sequence import ScheduledChunk, SequenceState

logger: logging.Logger = logging.getLogger(__name__)

Output: TypeAlias = Token | Pooled | EngineError | RequestNotStarted
OutputQueue: TypeAlias = asyncio.Queue[Output]


class RunningStep(NamedTuple):
    """A step whose tokens have not been read.

    Attributes:
        chunks: its chunks.
        launched: what to read; None if it could not be launched.
        started: when the device began to compute it, as `time.perf_counter` counts.
    """

    chunks: Sequence[ScheduledChunk]
    launched: LaunchedStep | None
    started: float


class Worker:
    """Runs steps in a separate thread; all methods are thread-safe.

    If the runner computes in the background, the next step is launched before the tokens of a step are read, unless it
    depends on them: then a GPU computes while the CPU records, delivers and schedules.

    `_lock` guards the scheduler, its counters and the output queues. It is never held while the model runs.

    Args:
        runner: runs the model.
        scheduler: schedules the steps.
        loop: the event loop of the readers.
        step_timeout: seconds after which a step is considered hung.
    """

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, loop: asyncio.AbstractEventLoop, *, step_timeout: float
    ) -> None:
        self._runner = runner
        self._schedules_ahead = runner.computes_in_background
        self._drafts = runner.drafts
        self._scheduler = scheduler
        self._loop = loop
        self._step_timeout = step_timeout
        self._step_started = math.inf
        self._outputs: dict[SequenceState, OutputQueue] = {}
        self._lock = threading.Condition()
        self._end_error: type[EngineError] | None = None
        self._thread = threading.Thread(target=self._work, name="dashinfer-vlm-torch-decoder", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> DecoderStats:
        with self._lock:
            return self._scheduler.stats

    @property
    def fatal_error(self) -> str:
        """Why the worker cannot decode although it was not stopped; empty while it can."""
        with self._lock:
            if self._end_error is DecoderFailed:
                return _ENDED
            hung = time.monotonic() - self._step_started > self._step_timeout
        return f"A step of the decoder has taken more than {self._step_timeout:g} seconds." if hung else ""

    def submit(self, sequence: SequenceState, output_queue: OutputQueue) -> None:
        """Add a sequence; its tokens, or the error that ends it, are put into `output_queue`.

        Raises:
            QueueFull: `max_waiting` requests are already waiting.
            EngineClosed: the worker was stopped.
            RequestNotStarted: the worker died.
        """
        with self._lock:
            sequence.waiting_since = time.monotonic()
            if self._end_error:
                raise _end_of(sequence, self._end_error)
            self._scheduler.add(sequence)
            self._outputs[sequence] = output_queue
            self._lock.notify()

    def cancel(self, sequence: SequenceState) -> None:
        """Cancel a sequence and free its memory; does nothing if it has already ended."""
        with self._lock:
            if self._outputs.pop(sequence, None):
                self._scheduler.remove(sequence)

    def forget(self, cache_salt: str) -> None:
        """Free the keys and values that are cached of prompts with this salt."""
        with self._lock:
            self._scheduler.forget(cache_salt)

    def stop(self) -> None:
        """End all sequences with EngineClosed after the current step, or that of another model that it waits for.

        Raises:
            DecoderFailed: the step hangs.
        """
        with self._lock:
            self._end_error = self._end_error or EngineClosed
            self._lock.notify()
            now = time.monotonic()
            seconds = min(self._step_started, now) + self._step_timeout - now
        self._thread.join(timeout=max(seconds, 0.0))
        if self._thread.is_alive():
            self._runner.executor.abandon(self._thread.ident)  # lets a waiting vision encoder continue
            self._end_all()
            raise DecoderFailed(
                f"A step of the decoder has not ended within {self._step_timeout:g} seconds. Only the end of the"
                " process stops it: restart the process."
            )

    def _work(self) -> None:
        try:
            while self._wait_for_requests():
                self._runner.executor.run(self._run_steps)
        except Exception:
            logger.exception("The decoder's thread died; all requests fail until the engine is restarted.")
        finally:
            self._end_all()

    def _wait_for_requests(self) -> bool:
        with self._lock:
            self._lock.wait_for(lambda: self._end_error or self._scheduler.busy)
            return not self._end_error

    def _run_steps(self) -> None:
        """Run steps until there are no requests, or until other work has to run: handing the executor from thread to
        thread takes half a millisecond."""
        step = self._launch_next()
        while step:
            ahead = self._launch_ahead(step)
            outcomes = self._read(step)
            failed = outcomes is None
            if outcomes is None:
                ahead = None  # it was computed from tokens that are not known to be right
                outcomes = self._compute_alone(step.chunks)
            now = time.perf_counter()
            self._finish_step(step.chunks, outcomes, now - step.started, ahead)
            if self._drafts and step.launched and not failed:
                self._draft(step.chunks, step.launched)
            if ahead is None and self._runner.must_yield():
                return
            step = ahead._replace(started=now) if ahead else self._launch_next()

    def _launch_next(self) -> RunningStep | None:
        with self._lock:
            if self._end_error or not self._scheduler.busy:
                return None
            step = self._scheduler.schedule()
            self._count(step.chunks)
        started = time.perf_counter()
        self._runner.copy_rows(step.copies)
        return RunningStep(step.chunks, self._launch(step.chunks), started)

    def _launch_ahead(self, step: RunningStep) -> RunningStep | None:
        if not self._schedules_ahead or step.launched is None or self._runner.executor.waiting:
            return None
        with self._lock:
            chunks = [] if self._end_error else self._scheduler.schedule_ahead(step.chunks)
        if not chunks:
            return None
        launched = self._launch(chunks, step.launched)
        if launched is None:
            self._schedules_ahead = False
            logger.warning("A step could not be launched ahead. From now on, tokens are read first.")
            return None
        return RunningStep(chunks, launched, time.perf_counter())

    def _count(self, chunks: Sequence[ScheduledChunk]) -> None:
        self._step_started = now = time.monotonic()
        counters = self._scheduler.counters
        for chunk in chunks:
            if chunk.sequence.waiting_since is not None:
                counters.started += 1
                counters.queue_seconds += now - chunk.sequence.waiting_since
                chunk.sequence.waiting_since = None
        counters.steps += 1
        counters.step_requests += len(chunks)

    def _launch(self, chunks: Sequence[ScheduledChunk], previous: LaunchedStep | None = None) -> LaunchedStep | None:
        try:
            return self._runner.launch(chunks, previous)
        except Exception:
            logger.warning("A step of %d requests could not be launched.", len(chunks), exc_info=True)
            return None

    def _read(self, step: RunningStep) -> dict[SequenceState, Outcome] | None:
        if step.launched is None:
            return None
        try:
            return self._runner.read(step.launched)
        except Exception:
            logger.warning("A step of %d requests failed.", len(step.chunks), exc_info=True)
            return None

    def _draft(self, chunks: Sequence[ScheduledChunk], launched: LaunchedStep) -> None:
        speculator = self._scheduler.speculator
        assert speculator
        with self._lock:
            counts = speculator.draft_counts(chunks)
            self._step_started = time.monotonic()
        started = time.perf_counter()
        try:
            drafted = self._runner.draft(launched, counts)
        except Exception:
            self._drafts = False
            logger.warning("Tokens could not be drafted. From now on, only repetitions are.", exc_info=True)
            return
        finally:
            with self._lock:
                self._step_started = math.inf
        with self._lock:
            speculator.record_drafts(drafted, time.perf_counter() - started)

    def _compute_alone(self, chunks: Sequence[ScheduledChunk]) -> dict[SequenceState, Outcome]:
        """Compute each chunk of a step that failed alone, so that only the one that causes it fails. Sequences that
        have ended or been canceled since are skipped.

        Raises:
            RuntimeError: the device is lost, so no request can be computed.
        """
        with self._lock:
            running = [chunk for chunk in chunks if chunk.sequence in self._outputs]
        outcomes: dict[SequenceState, Outcome] = {}
        for chunk in running:
            try:
                outcomes |= self._runner.step([chunk])
            except Exception:  # noqa: PERF203 - any of them may fail
                self._runner.check_device()
                logger.exception("Request %s failed in the decoder.", chunk.sequence.request.id)
                outcomes[chunk.sequence] = DecoderFailed(
                    "The decoder failed on this request; see the engine's log for the cause."
                )
        return outcomes

    def _finish_step(
        self,
        chunks: Sequence[ScheduledChunk],
        outcomes: dict[SequenceState, Outcome],
        seconds: float,
        ahead: RunningStep | None,
    ) -> None:
        with self._lock:
            self._step_started = math.inf
            if ahead:
                self._count(ahead.chunks)
            self._scheduler.record_seconds(chunks, seconds)
            outputs = self._scheduler.update(chunks, outcomes)
            deliveries = [(self._outputs[sequence], output) for sequence, output in outputs]
            for sequence, output in outputs:
                if not isinstance(output, Token) or output.finish_reason:
                    del self._outputs[sequence]
        # The event loop processes these tokens while the next step computes, not while Python code prepares it.
        self._runner.executor.defer(functools.partial(self._deliver, deliveries))

    def _end_all(self) -> None:
        with self._lock:
            self._end_error = error = self._end_error or DecoderFailed
            deliveries: list[tuple[OutputQueue, Output]] = [
                (output_queue, _end_of(sequence, error)) for sequence, output_queue in self._outputs.items()
            ]
            self._scheduler.clear()
            self._outputs.clear()
        self._deliver(deliveries)

    def _deliver(self, deliveries: Sequence[tuple[OutputQueue, Output]]) -> None:
        if not deliveries:
            return
        try:
            self._loop.call_soon_threadsafe(put_all, deliveries)
        except RuntimeError:  # the loop was closed while readers were waiting
            with self._lock:
                for sequence in list(self._outputs):
                    self.cancel(sequence)


def _end_of(sequence: SequenceState, error: type[EngineError]) -> EngineError | RequestNotStarted:
    """Return why a sequence ends with the worker. If the worker died, a sequence that has memory may be the cause."""
    is_started = sequence.waiting_since is None or sequence.allocation is not None
    return RequestNotStarted() if error is DecoderFailed and not is_started else error(_ENDED)


_ENDED = "The decoder has stopped. Start the engine again."
