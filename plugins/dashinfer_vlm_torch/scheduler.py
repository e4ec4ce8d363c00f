"""Whose tokens go into the next step: admission, chunked prefill, preemption, cancellation. Pure Python; no tensor, no
thread, no clock."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dashinfer_vlm_core.decoders import DecodeRequest, FinishReason, Token, GrammarMatcher
from dashinfer_vlm_core.errors import DecoderFailed, QueueFull

from .arena import Slab
from .memory import Memory, Move
from .prefix import BLOCK, Trail

SEED_BITS = 64

ROOM = 64
"""Rows for a run's answer at its beginning; later, as many as the answer has already."""


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
        trail: what stands where in prompt and answer.
        slab: first row of its keys and values in the pool, as of the step under way: `plan` alone changes it.
        held: its rows in the pool; None while it waits.
        answer: tokens chosen so far.
        walk: the answer's way through the request's grammar, if it has one.
        cached: tokens that were found, and not read, before its first answer token.
        own: tokens that it had read itself when it was put back: to find those again is no gain.
    """

    request: DecodeRequest
    stops: frozenset[int]
    seed: int
    first_position: int
    trail: Trail
    slab: int = -1
    held: Slab | None = None
    answer: list[int] = field(default_factory=list)
    walk: GrammarMatcher | None = None
    cached: int = 0
    own: int = 0

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
            trail=Trail(request),
            walk=request.grammar.new_matcher() if request.grammar else None,
        )

    @property
    def prompt_length(self) -> int:
        return len(self.request.token_ids)

    @property
    def length(self) -> int:
        """Tokens known so far: prompt and answer."""
        return self.prompt_length + len(self.answer)

    @property
    def read(self) -> int:
        """Tokens, from the first on, whose keys and values are in the pool."""
        return self.held.read if self.held else 0

    @property
    def unread(self) -> int:
        return self.length - self.read

    @property
    def decodes(self) -> bool:
        """Whether all but the newest token of its answer is read."""
        return bool(self.answer) and self.unread == 1

    @property
    def max_tokens(self) -> int:
        assert self.request.sampling.max_tokens is not None
        return self.request.sampling.max_tokens

    @property
    def footprint(self) -> int:
        """Rows of the pool that it may come to need."""
        return self.prompt_length + self.max_tokens

    @property
    def wish(self) -> int:
        """Rows with which it can go on for a while."""
        return min(self.footprint, self.length + max(ROOM, len(self.answer)))

    @property
    def too_short(self) -> bool:
        """Whether the next token may not end the answer."""
        return len(self.answer) < self.request.sampling.min_tokens

    def token_ids(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens [start, stop)."""
        prompt, first = self.request.token_ids[start:stop], max(start - self.prompt_length, 0)
        answer = self.answer[first : max(stop - self.prompt_length, 0)]
        return np.append(prompt, answer).astype(np.int64) if answer else prompt

    def positions(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Positions of tokens [start, stop), broadcastable to [3, stop - start]."""
        after = np.arange(max(start, self.prompt_length), stop)[None] + (self.first_position - self.prompt_length)
        if start >= self.prompt_length:
            return after
        return np.concatenate((self.request.positions[:, start:stop], np.tile(after, (3, 1))), axis=1)

    def append(self, token: int) -> None:
        """Go on by the next token of the answer."""
        self.answer.append(token)
        self.trail.append(token, self.first_position + len(self.answer) - 1)
        if self.walk:
            self.walk.accept_token(token)

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


class Step(NamedTuple):
    """What to do next: copy rows, in order, then read the chunks together."""

    moves: list[Move]
    chunks: list[Chunk]


class Stats(NamedTuple):
    """A snapshot; the last four count from the start.

    Attributes:
        running: requests in the batch.
        waiting: requests that wait for a place in it.
        kv_used: tokens' worth of memory for keys and values that running requests hold.
        kv_cached: tokens' worth that is kept for later requests, and given up as soon as it is needed.
        kv_size: tokens' worth that there is.
        queries: prompts that were read.
        hits: prompts of which a part was found, and not read.
        cached_tokens: tokens of prompts that were found.
        preemptions: times that a running request had to wait again.
    """

    running: int
    waiting: int
    kv_used: int
    kv_cached: int
    kv_size: int
    queries: int = 0
    hits: int = 0
    cached_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """Requests in the order of their arrival; not safe for threads by itself.

    A run is admitted with memory for its prompt and the beginning of its answer, and gets more as it goes on. Where
    there is no more, the youngest running request is put back to the head of the queue, and reads its prompt and its
    answer so far again later. The first in the queue is admitted first, however small those behind it are. So the
    oldest always goes on, and nobody starves.
    """

    def __init__(
        self, *, kv_tokens: int, max_batch_size: int, max_waiting: int, prefill_chunk: int, prefix_cache: bool = True
    ) -> None:
        self._memory = Memory(kv_tokens, caching=prefix_cache)
        self._prefix_cache = prefix_cache
        self._max_batch_size = max_batch_size
        self._max_waiting = max_waiting
        self._prefill_chunk = prefill_chunk
        self._waiting: deque[Run] = deque()
        self._running: dict[Run, Slab] = {}  # oldest first
        self._queries = self._hits = self._cached_tokens = self._preemptions = 0

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def stats(self) -> Stats:
        return Stats(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_used=self._memory.used,
            kv_cached=self._memory.cached,
            kv_size=self._memory.size,
            queries=self._queries,
            hits=self._hits,
            cached_tokens=self._cached_tokens,
            preemptions=self._preemptions,
        )

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

    def remove(self, run: Run, *, failed: bool = False) -> None:
        """Forget a run and free what it held; a run that has ended already is no error.

        A step that is under way may still write to the run's rows. That is harmless: what it writes is not booked as
        read, and the next owner of the rows writes in a later step.

        Args:
            run: one that was added.
            failed: whether its keys and values are not to be trusted.
        """
        if run in self._running:
            self._memory.release(self._running.pop(run), keep=not failed)
            run.held = None
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

    def plan(self) -> Step:
        """The next step: the newest token of every answer, and up to `prefill_chunk` tokens of what is not read yet;
        half as many beside answers, which each step holds up."""
        self._make_room()
        shares = self._share([run for run in self._running if not run.decodes])
        chunks = []
        for run, held in self._running.items():
            run.slab = held.start
            tokens = 1 if run.decodes else shares.get(run, 0)
            if tokens:
                chunks.append(Chunk(run, run.read, run.read + tokens))
        return Step(self._memory.take_moves(), chunks)

    def commit(
        self, chunks: Sequence[Chunk], choices: Mapping[Run, Outcome]
    ) -> list[tuple[Run, Token | DecoderFailed]]:
        """Book what a step has done; the tokens and errors to deliver. Runs that were removed meanwhile are passed
        over."""
        replies: list[tuple[Run, Token | DecoderFailed]] = []
        for run, _, stop in chunks:
            if run not in self._running:
                continue
            choice = choices.get(run)
            if isinstance(choice, DecoderFailed):
                self.remove(run, failed=True)
                replies.append((run, choice))
                continue
            self._memory.advance(self._running[run], stop)
            if choice is not None:
                replies.append((run, self._append(run, choice)))
        return replies

    def _append(self, run: Run, choice: Choice) -> Token:
        run.append(choice.id)
        first = len(run.answer) == 1
        if first:
            self._queries += 1
            self._hits += run.cached > 0
            self._cached_tokens += run.cached
        finish = run.finish()
        if finish:
            self.remove(run)
        cached = run.cached if first else 0
        return Token(id=choice.id, logprob=choice.logprob, top_logprobs=choice.top, finish_reason=finish, cached_tokens=cached)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_batch_size:
            run = self._waiting[0]
            held = self._memory.hold(run.trail, run.wish)
            if held is None:
                return
            self._waiting.popleft()
            self._running[run] = run.held = held
            if not run.answer:
                run.cached = min(held.read, run.cached) + max(held.read - run.cached - run.own, 0)

    def _make_room(self) -> None:
        """Rows for the next token of everybody, the oldest first, at the cost of the youngest."""
        for run in list(self._running):
            while run in self._running and not self._grow(run):
                self._preempt(next(reversed(self._running)))

    def _grow(self, run: Run) -> bool:
        held = self._running[run]
        if run.length <= held.rows:
            return True
        least = min(run.footprint, run.length + BLOCK)
        return self._memory.grow(held, run.wish) or self._memory.grow(held, least)

    def _preempt(self, run: Run) -> None:
        run.own = run.read - run.cached
        self._memory.release(self._running.pop(run))
        run.held = None
        self._waiting.appendleft(run)
        self._preemptions += 1

    def _share(self, runs: Iterable[Run]) -> dict[Run, int]:
        """How many tokens each run may read in the next step.

        Half of the budget goes to whoever came first, so that it is read at half speed at least; the rest to those with
        the least left, so that a short prompt does not wait for a long one.
        """
        left = {run: run.unread for run in self._without_followers(runs)}
        beside = any(run.decodes for run in self._running)
        budget = (self._prefill_chunk + 1) // 2 if beside else self._prefill_chunk
        shares = dict.fromkeys(left, 0)
        for run in list(left)[:1]:
            shares[run] = min(left[run], (budget + 1) // 2)
            budget -= shares[run]
        for run in sorted(left, key=left.__getitem__):
            more = min(left[run] - shares[run], budget)
            shares[run] += more
            budget -= more
        return shares

    def _without_followers(self, runs: Iterable[Run]) -> list[Run]:
        """Without those that had better wait until another run has read what they have in common.

        To read takes time by the token, so that two who read the same take twice as long, both. Who has mostly
        something else to read does not wait.
        """
        if not self._prefix_cache:
            return list(runs)
        going: list[Run] = []
        ahead: set[bytes] = set()
        for run in runs:
            found = self._memory.catch_up(self._running[run])
            run.cached += 0 if run.answer else found
            blocks = run.trail.digests[run.read // BLOCK :]
            common = next((i for i, digest in enumerate(blocks) if digest not in ahead), len(blocks)) * BLOCK
            if not common or 2 * common < run.unread:
                going.append(run)
                ahead.update(blocks)
        return going
