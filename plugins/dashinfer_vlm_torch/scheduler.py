"""Whose tokens go into the next step: admission, chunked prefill, cancellation. Pure Python; no tensor, no thread, no
clock."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dashinfer_vlm_core.decoder import DecodeRequest, FinishReason, Token, Walk
from dashinfer_vlm_core.errors import DecoderFailed, QueueFull

from .arena import Arena

SEED_BITS = 64


class Choice(NamedTuple):
    """What the sampler chose for one request.

    Attributes:
        id: the token.
        logprob: its log-probability in the model's own distribution; None unless asked for.
        top: the most likely tokens as (id, logprob), most likely first.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


Outcome: TypeAlias = Choice | DecoderFailed


@dataclass(slots=True, kw_only=True, eq=False)
class Run:
    """One request on its way: waiting, then running.

    Attributes:
        request: what was asked.
        stops: tokens that end the answer.
        seed: names the sequence of its random numbers.
        first_position: M-RoPE position of the first answer token, on all three axes.
        slab: first row of its keys and values in the pool.
        read: tokens, from the first on, whose keys and values are in the pool.
        answer: tokens chosen so far.
        walk: the answer's way through the request's grammar, if it has one.
    """

    request: DecodeRequest
    stops: frozenset[int]
    seed: int
    first_position: int
    slab: int = -1
    read: int = 0
    answer: list[int] = field(default_factory=list)
    walk: Walk | None = None

    @classmethod
    def of(cls, request: DecodeRequest, stop: Iterable[int]) -> Run:
        """A run of `request` by a model whose own stop tokens are `stop`."""
        sampling = request.sampling
        seed = secrets.randbits(SEED_BITS) if sampling.seed is None else sampling.seed % (1 << SEED_BITS)
        return cls(
            request=request,
            stops=frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else stop),
            seed=seed,
            first_position=int(request.positions.max()) + 1,
            walk=request.guide.begin() if request.guide else None,
        )

    @property
    def prompt_length(self) -> int:
        return len(self.request.token_ids)

    @property
    def length(self) -> int:
        """Tokens known so far: prompt and answer."""
        return self.prompt_length + len(self.answer)

    @property
    def max_tokens(self) -> int:
        assert self.request.sampling.max_tokens is not None
        return self.request.sampling.max_tokens

    @property
    def footprint(self) -> int:
        """Rows of the pool that it may come to need."""
        return self.prompt_length + self.max_tokens

    @property
    def too_short(self) -> bool:
        """Whether the next token may not end the answer."""
        return len(self.answer) < self.request.sampling.min_tokens

    def token_ids(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens [start, stop), all of the prompt or all of the answer."""
        if stop <= self.prompt_length:
            return self.request.token_ids[start:stop]
        return np.array(self.answer[start - self.prompt_length : stop - self.prompt_length], dtype=np.int64)

    def positions(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Positions of tokens [start, stop), broadcastable to [3, stop - start]."""
        if stop <= self.prompt_length:
            return self.request.positions[:, start:stop]
        return np.arange(start, stop)[None] + (self.first_position - self.prompt_length)

    def finish(self) -> FinishReason | None:
        """Why the answer ends with its last token, if it does."""
        if self.answer[-1] in self.stops:
            return "stop"
        return "length" if len(self.answer) == self.max_tokens else None


class Chunk(NamedTuple):
    """Tokens [start, stop) of a run, to be read in one step."""

    run: Run
    start: int
    stop: int

    @property
    def last(self) -> bool:
        """Whether the step ends by choosing the run's next token."""
        return self.stop == self.run.length


class Stats(NamedTuple):
    """A snapshot.

    Attributes:
        running: requests in the batch.
        waiting: requests that wait for a place in it.
        kv_used: tokens' worth of memory for keys and values that running requests hold.
        kv_size: tokens' worth that there is.
    """

    running: int
    waiting: int
    kv_used: int
    kv_size: int


class Scheduler:
    """Requests in the order of their arrival; not safe for threads by itself.

    A run is admitted with memory for its whole prompt and its longest answer, so that a running request never lacks
    memory. The first in the queue is admitted first, however small those behind it are: nobody starves.
    """

    def __init__(self, *, kv_tokens: int, max_batch_size: int, max_waiting: int, prefill_chunk: int) -> None:
        self._arena = Arena(kv_tokens)
        self._max_batch_size = max_batch_size
        self._max_waiting = max_waiting
        self._prefill_chunk = prefill_chunk
        self._waiting: deque[Run] = deque()
        self._running: dict[Run, None] = {}  # an ordered set

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def stats(self) -> Stats:
        return Stats(len(self._running), len(self._waiting), self._arena.used, self._arena.size)

    def add(self, run: Run) -> None:
        """Take a run whose footprint is at most the pool's size.

        Raises:
            QueueFull: it would have to wait, and `max_waiting` requests do already.
        """
        self._waiting.append(run)
        self._admit()
        if len(self._waiting) > self._max_waiting:
            self._waiting.remove(run)
            raise QueueFull(f"{self._max_waiting} requests wait already. Try again in a second.")

    def remove(self, run: Run) -> None:
        """Forget a run and free what it held; a run that has ended already is no error.

        A step that is under way may still write to the run's slab. That is harmless: the next owner writes in a later
        step, and reads only what it has written.
        """
        if run in self._running:
            del self._running[run]
            self._arena.free(run.slab)
        elif run in self._waiting:
            self._waiting.remove(run)
        self._admit()

    def clear(self) -> list[Run]:
        """Remove all runs; the runs that there were."""
        runs = [*self._running, *self._waiting]
        self._waiting.clear()
        for run in list(self._running):
            self.remove(run)
        return runs

    def plan(self) -> list[Chunk]:
        """The next step: the newest token of every answer, and up to `prefill_chunk` prompt tokens, first come
        first."""
        budget = self._prefill_chunk
        chunks = []
        for run in self._running:
            tokens = run.length - run.read
            if not run.answer:
                tokens = min(tokens, budget)
                budget -= tokens
            if tokens:
                chunks.append(Chunk(run, run.read, run.read + tokens))
        return chunks

    def commit(
        self, chunks: Sequence[Chunk], choices: Mapping[Run, Outcome]
    ) -> list[tuple[Run, Token | DecoderFailed]]:
        """Book what a step has done; the tokens and errors to deliver. Runs that were removed meanwhile are passed
        over."""
        replies: list[tuple[Run, Token | DecoderFailed]] = []
        for run, _, stop in chunks:
            if run not in self._running:
                continue
            run.read = stop
            choice = choices.get(run)
            if isinstance(choice, Choice):
                replies.append((run, self._append(run, choice)))
            elif choice is not None:
                self.remove(run)
                replies.append((run, choice))
        return replies

    def _append(self, run: Run, choice: Choice) -> Token:
        run.answer.append(choice.id)
        if run.walk:
            run.walk.take(choice.id)
        finish = run.finish()
        if finish:
            self.remove(run)
        return Token(id=choice.id, logprob=choice.logprob, top=choice.top, finish=finish)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_batch_size:
            slab = self._arena.allocate(self._waiting[0].footprint)
            if slab is None:
                return
            run = self._waiting.popleft()
            run.slab = slab
            self._running[run] = None
