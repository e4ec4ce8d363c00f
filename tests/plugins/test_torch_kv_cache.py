"""Equal beginnings, rows and slabs: what is shared, what is kept, and what is given up for it; without a model."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dashinfer_vlm_core.decoders import DecodeRequest
from dashinfer_vlm_core.errors import QueueFull
from dashinfer_vlm_core.models.interface import Grid
from dashinfer_vlm_core.models.qwen2_vl.config import read_text_model
from dashinfer_vlm_torch.attention import KVCache
from dashinfer_vlm_torch.kv_allocator import KVAllocation, KVAllocator
from dashinfer_vlm_torch.kv_cache_manager import KVCacheManager, KVCopy
from dashinfer_vlm_torch.prefix_hash import BLOCK, PrefixHash
from dashinfer_vlm_torch.scheduler import SampledToken, Scheduler, SequenceState

from .oracle import prompt, visual

PICTURE = visual(20, (1, 4, 5), 30, width=1)


def shared(one, other):
    """Tokens with which the second request can start, once the first was read."""
    memory = KVCacheManager(1000, caching=True)
    first = memory.allocate(PrefixHash(one), len(one.token_ids))
    memory.mark_computed(first, len(one.token_ids))
    memory.free(first)
    return memory.allocate(PrefixHash(other), len(other.token_ids)).num_computed_tokens


def with_tokens(request, index, **changes):
    """The request, with something else in one of its spans."""
    spans = list(request.spans)
    spans[index] = replace(spans[index], tokens=replace(spans[index].tokens, **changes))
    return replace(request, spans=tuple(spans))


def at(array, index, value):
    changed = array.copy()
    changed[..., index] = value
    return changed


# What is the same


def test_the_last_token_is_always_read():
    assert shared(prompt(1, 48), prompt(1, 48)) == 47


@pytest.mark.parametrize("place", [16, 17, 31, 32, 40, 46])
def test_the_first_token_that_differs_ends_what_is_shared(place):
    other = prompt(1, 48)
    assert shared(prompt(1, 48), replace(other, token_ids=at(other.token_ids, place, 91))) == place


def test_less_than_a_block_is_not_shared():
    other = prompt(1, 48)
    assert shared(prompt(1, 48), replace(other, token_ids=at(other.token_ids, BLOCK - 1, 91))) == 0


def test_a_picture_is_shared_with_what_stands_before_and_behind_it():
    assert shared(PICTURE, visual(20, (1, 4, 5), 30, width=1)) == len(PICTURE.token_ids) - 1


def test_another_picture_ends_it_though_the_tokens_are_the_same():
    assert shared(PICTURE, with_tokens(PICTURE, 0, digest=bytes(32))) == 20


def test_another_grid_ends_it_though_tokens_digest_and_positions_are_the_same():
    assert shared(PICTURE, with_tokens(PICTURE, 0, grid=Grid(1, 10, 8))) == 20


@pytest.mark.parametrize("axis", range(3))
def test_another_position_ends_it_on_any_axis(axis):
    positions = PICTURE.positions.copy()
    positions[axis, 30] += 1
    assert shared(PICTURE, replace(PICTURE, positions=positions)) == 30


def test_another_place_within_the_same_picture_ends_it():
    """As if the picture began again halfway, at positions made to fit."""
    (span,) = PICTURE.spans
    half = replace(span.tokens, embedding=span.tokens.embedding[:10])
    halves = tuple(replace(span, start=start, tokens=half) for start in (20, 30))
    assert shared(PICTURE, replace(PICTURE, spans=halves)) == 30


def test_a_picture_is_no_video_of_the_same_digest():
    still, moving = visual(20, (1, 4, 5), 3, width=1), visual(20, (5, 4, 1), 3, width=1)
    moving = replace(with_tokens(moving, 0, digest=still.spans[0].tokens.digest), positions=still.positions)
    assert shared(still, moving) == 20


def test_two_pictures_swapped_part_at_the_first():
    both = visual(20, (1, 4, 5), 4, (1, 4, 5), 9, width=1)
    first, second = both.spans
    swapped = (replace(first, tokens=second.tokens), replace(second, tokens=first.tokens))
    assert shared(both, replace(both, spans=swapped)) == 20
    assert shared(both, with_tokens(both, 1, digest=bytes(32))) == 44


def test_salts_share_nothing():
    text, salted = prompt(1, 48), replace(prompt(1, 48), cache_salt="anna")
    assert shared(salted, salted) == 47
    for one, other in [(text, salted), (salted, text), (salted, replace(text, cache_salt="bert"))]:
        assert shared(one, other) == 0


def test_the_answer_belongs_to_what_is_shared():
    whole = prompt(1, 60)
    prefix = PrefixHash(replace(whole, token_ids=whole.token_ids[:30], positions=whole.positions[:, :30]))
    for index in range(30, 60):
        prefix.append(int(whole.token_ids[index]), index)
    assert prefix.digests == PrefixHash(whole).digests
    assert prefix.common_length(PrefixHash(whole), 48) == 12


# What is kept


def keep(memory, request, *, read=None):
    """A run comes, reads so many tokens of its prompt, and ends; its slab."""
    allocation = memory.allocate(PrefixHash(request), len(request.token_ids))
    memory.mark_computed(allocation, max(allocation.num_computed_tokens, read or len(request.token_ids)))
    memory.free(allocation)
    return allocation


def spans(memory):
    return [(allocation.start, allocation.stop) for allocation in memory._allocator.allocations]


def test_what_is_the_beginning_of_something_kept_is_not_kept_twice():
    memory = KVCacheManager(1000, caching=True)
    keep(memory, prompt(1, 64))
    keep(memory, prompt(1, 100))  # goes on in the same rows
    assert spans(memory) == [(0, 100)]
    keep(memory, prompt(1, 70), read=70)
    assert memory.cached == 100
    apart = [memory.allocate(PrefixHash(prompt(2, length)), length) for length in (100, 64)]
    for allocation in apart:
        memory.mark_computed(allocation, allocation.rows)
    for allocation in reversed(apart):
        memory.free(allocation)
    assert memory.cached == 200


def test_what_was_not_used_for_longest_goes_first_and_loses_its_end():
    memory = KVCacheManager(300, caching=True)
    for content in (1, 2, 3):
        keep(memory, prompt(content, 100))
    memory.free(memory.allocate(PrefixHash(prompt(1, 100)), 100))  # whoever uses the oldest makes it the newest
    for content, left in ((4, 60), (5, 20)):
        assert memory.allocate(PrefixHash(prompt(content, 40)), 40).num_computed_tokens == 0
        assert [shared_with(memory, kept) for kept in (1, 2, 3)] == [99, left, 99]


def shared_with(memory, content):
    match = memory._find_prefix(PrefixHash(prompt(content, 100)))
    return match.num_tokens if match else 0


def test_what_a_run_reads_from_is_not_given_up_for_it():
    """There would be room in place of it, and in place of others."""
    memory = KVCacheManager(200, caching=True)
    source, _ = keep(memory, prompt(1, 100)), keep(memory, prompt(2, 100))
    other = prompt(1, 90)
    allocation = memory.allocate(PrefixHash(replace(other, token_ids=at(other.token_ids, slice(50, 90), 1))), 90)
    assert allocation.num_computed_tokens == 50
    assert (source.start, source.num_computed_tokens) == (0, 100)


def test_what_is_copied_first_may_be_overwritten_next():
    """The first run copies what the second one's rows are then taken from."""
    memory = KVCacheManager(300, caching=True)
    for content in (1, 2):
        keep(memory, prompt(content, 100))
    for content, length in ((1, 90), (2, 100)):
        other = prompt(content, length)
        memory.allocate(PrefixHash(replace(other, token_ids=at(other.token_ids, slice(50, None), 1))), length)
    assert memory.take_copies() == [KVCopy(0, 200, 50), KVCopy(100, 0, 50)]
    assert memory.take_copies() == []


def test_where_there_is_no_other_room_the_source_itself_is_taken_over():
    memory = KVCacheManager(150, caching=True)
    source = keep(memory, prompt(1, 100))
    other = prompt(1, 90)
    allocation = memory.allocate(PrefixHash(replace(other, token_ids=at(other.token_ids, slice(50, 90), 1))), 90)
    assert (allocation, allocation.num_computed_tokens, memory.take_copies()) == (source, 50, [])
    assert shared_with(memory, 1) == 50


def test_a_slab_that_finds_no_room_leaves_everything_as_it_was():
    memory = KVCacheManager(200, caching=True)
    running = memory.allocate(PrefixHash(prompt(2, 80)), 80)
    keep(memory, prompt(1, 100))
    assert memory.allocate(PrefixHash(prompt(1, 130)), 130) is None
    assert not memory.grow(running, 201)
    assert shared_with(memory, 1) == 99
    assert memory.take_copies() == []


def test_the_index_is_empty_when_nothing_is_left():
    memory = KVCacheManager(400, caching=True)
    for content in range(9):
        keep(memory, prompt(content, 100))
    memory.free(memory.allocate(PrefixHash(prompt(99, 400)), 400), keep=False)
    assert (memory._index, memory.cached, memory.used, memory._allocator.allocations) == ({}, 0, 0, ())


def test_a_digest_takes_a_look_at_every_byte_before_it():
    """One bit anywhere in the first block changes every digest after it."""
    request = prompt(1, 64)
    digests = PrefixHash(request).digests
    other = PrefixHash(replace(request, token_ids=at(request.token_ids, 0, request.token_ids[0] ^ 1))).digests
    assert len(digests) == 4
    assert not set(digests) & set(other)


# Rows


def allocation(arena, rows, leaving=()):
    made = KVAllocation(prefix=PrefixHash(prompt(0, 1)))
    start = arena.find_start(made, rows, leaving)
    if start is not None:
        arena.place(made, start, rows)
    return made if start is not None else None


def test_a_slab_takes_the_tightest_gap():
    arena = KVAllocator(100)
    large, _, small, _ = (allocation(arena, rows) for rows in (30, 10, 20, 40))
    arena.remove(large)
    arena.remove(small)
    assert allocation(arena, 15).start == small.start
    assert allocation(arena, 25).start == large.start
    assert allocation(arena, 25) is None


def test_a_slab_grows_where_it_is_if_it_can():
    arena = KVAllocator(100)
    first, second = allocation(arena, 30), allocation(arena, 30)
    assert arena.find_start(second, 70, ()) == 30
    assert arena.find_start(first, 40, ()) == 60
    assert arena.find_start(first, 50, ()) is None
    assert arena.find_start(first, 100, [second]) == 0


def test_the_first_range_that_comes_free_is_taken_from_its_end():
    arena = KVAllocator(100)
    allocations = [allocation(arena, 20) for _ in range(5)]
    order = [allocations[index] for index in (4, 1, 3, 0, 2)]
    assert (
        arena.find_start(KVAllocation(prefix=allocations[0].prefix), 30, order) == 70
    )  # 4 and 3 lie side by side; 1 need not go
    assert arena.find_start(KVAllocation(prefix=allocations[0].prefix), 50, order) == 50
    assert arena.find_start(KVAllocation(prefix=allocations[0].prefix), 101, order) is None


def test_rows_are_moved_whole_also_onto_themselves(oracle):
    config = read_text_model(oracle.folder)
    cache = KVCache(config, 50, device="cpu", dtype=torch.float32)
    for source, target, rows in [(0, 30, 20), (10, 3, 30), (3, 10, 30), (5, 5, 9)]:
        cache.pool.copy_(torch.randn(cache.pool.shape))
        before = cache.pool.clone()
        cache.move(source, target, rows)
        before[:, :, target : target + rows] = before[:, :, source : source + rows].clone()
        assert torch.equal(cache.pool, before)


# Everything together


class Pool:
    """Plays the model: what a row holds is a name of all that came before it, and the next token follows from that."""

    def __init__(self, **options):
        self.scheduler = Scheduler(max_waiting=3, **options)
        self.budget = options["prefill_chunk"]
        self.rows = [None] * options["kv_tokens"]
        self.there = []
        self.ended = []

    def happen(self, event):
        """A request comes; so many steps are done; one of the requests is cancelled, (number,); or several of that
        while a step is under way."""
        if isinstance(event, DecodeRequest):
            self.add(SequenceState.of(event, stop=()))
        elif isinstance(event, int):
            self.go_on(event)
        elif isinstance(event, tuple):
            self.cancel(*event)
        elif self.scheduler.busy:
            self.step(meanwhile=event)
        self.check()

    def add(self, run):
        try:
            self.scheduler.add(run)
            self.there.append(run)
        except QueueFull:
            assert len(self.scheduler._waiting) == 3

    def cancel(self, number):
        if self.there:
            self.scheduler.remove(self.there.pop(number % len(self.there)))

    def go_on(self, steps):
        while steps and self.scheduler.busy:
            self.step()
            self.check()
            steps -= 1

    def step(self, *, meanwhile=()):
        """Carry out a step, and what happens while it is under way."""
        moves, chunks = self.scheduler.schedule()
        assert chunks
        decoding = {chunk.sequence for chunk in chunks if chunk.sequence.is_decoding}
        budget = (self.budget + 1) // 2 if decoding else self.budget
        assert sum(stop - start for run, start, stop in chunks if run not in decoding) <= budget
        assert decoding == {run for run in self.scheduler._running if run.is_decoding}
        for source, target, rows in moves:
            self.rows[target : target + rows] = self.rows[source : source + rows]
        for event in meanwhile:
            self.happen(event)
        choices = {}
        for chunk in chunks:
            run, start, stop = chunk
            expected, row = names(run), run.first_row
            assert self.rows[row : row + start] == expected[:start]
            self.rows[row + start : row + stop] = expected[start:stop]
            if chunk.last:
                choices[run] = SampledToken(expected[-1] % 90)
        for run, token in self.scheduler.update(chunks, choices):
            if token.finish_reason:
                self.there.remove(run)
                self.ended.append(run)

    def check(self):
        """What has to hold between any two steps."""
        memory = self.scheduler._memory
        allocations = memory._allocator.allocations
        assert all(one.stop <= other.start for one, other in pairwise(allocations))
        assert all(
            allocation.start >= 0 and allocation.rows and allocation.stop <= memory.size for allocation in allocations
        )
        assert {allocation for allocation in allocations if not allocation.is_free} == set(
            self.scheduler._running.values()
        )
        assert sum(allocation.rows for allocation in allocations) == memory.used + memory.cached
        assert set(memory._free.values()) == {allocation for allocation in allocations if allocation.is_free}
        listed = {}
        for allocation in allocations:
            assert allocation.num_indexed_blocks == (allocation.num_computed_tokens // BLOCK if memory._caching else 0)
            for digest in allocation.prefix.digests[: allocation.num_indexed_blocks]:
                listed.setdefault(digest, set()).add(allocation)
        assert {digest: set(allocations) for digest, allocations in memory._index.items()} == listed
        for key, allocation in memory._free.items():
            assert [other for other in listed[key] if other.is_free] == [allocation]


def names(run):
    """A number for each token of a run, which follows from all that its keys and values depend on."""
    request, name, found = run.request, hash(run.request.cache_salt), []
    inside = {
        span.start + offset: (span.tokens.digest, span.tokens.grid, offset)
        for span in request.spans
        for offset in range(span.stop - span.start)
    }
    tokens, positions = run.token_ids(0, run.length), run.positions(0, run.length)
    for index, token in enumerate(tokens.tolist()):
        name = hash((name, token, tuple(positions[:, index].tolist()), inside.get(index)))
        found.append(name)
    return found


def answer(run):
    """The answer of a run that is alone and finds nothing."""
    alone = SequenceState.of(run.request, stop=())
    while len(alone.output_ids) < alone.max_tokens:
        alone.append(names(alone)[-1] % 90)
    return alone.output_ids


PARTS = (17, (1, 3, 4), 9, (1, 2, 3), 20, (2, 2, 3), 30)

requests = st.builds(
    lambda content, parts, tail, length, salt: replace(
        visual(*PARTS[:parts], tail, width=1, content=content, max_tokens=length, ignore_eos=True), cache_salt=salt
    ),
    content=st.integers(0, 1),
    parts=st.integers(0, len(PARTS)),
    tail=st.integers(1, 40),
    length=st.integers(1, 120),
    salt=st.sampled_from(["", "", "", "anna"]),
)
arrivals = st.one_of(requests, st.tuples(st.integers(0, 5)))
events = st.lists(st.one_of(arrivals, st.integers(1, 30), st.lists(arrivals, max_size=3)), min_size=1, max_size=25)


@pytest.mark.slow
@given(
    events=events,
    kv_tokens=st.integers(300, 700),
    batch=st.integers(1, 5),
    chunk=st.integers(1, 200),
    caching=st.sampled_from([True, True, True, False]),
)
def test_nobody_reads_what_is_not_theirs_and_everybody_ends(events, kv_tokens, batch, chunk, caching):
    pool = Pool(kv_tokens=kv_tokens, max_batch_size=batch, prefill_chunk=chunk, prefix_cache=caching)
    for event in events:
        pool.happen(event)
    pool.go_on(20_000)
    assert not pool.there
    assert not pool.scheduler.busy
    for run in pool.ended:
        assert run.output_ids == answer(run)
        assert 0 <= run.num_cached_tokens < run.prompt_length
    assert pool.scheduler.stats.kv_used == 0


def test_equal_beginnings_of_many_requests_take_little_time_to_find_prefix():
    """A block that thousands of slabs begin with, and prompts of thousands of tokens: a count of what is compared."""
    memory = KVCacheManager(40_000, caching=True)
    base = np.tile(prompt(1, 16).token_ids, 1)
    for tail in range(1000):
        request = prompt(2, 33)
        request.token_ids[:16], request.token_ids[16] = base, tail % 90
        request.token_ids[17] = tail // 90
        keep(memory, request)
    looks = []

    class Watched(dict):
        def __contains__(self, key):
            looks.append(key)
            return super().__contains__(key)

    memory._index = Watched(memory._index)
    long = prompt(3, 4000)
    long.token_ids[:16] = base
    assert memory._find_prefix(PrefixHash(long)).num_tokens >= 16
    assert len(looks) <= 9
