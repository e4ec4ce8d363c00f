"""Prefix caching and KV allocation without a model: sharing, retention and eviction."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dashinfer_vlm_core.decoders import DecodeRequest, Token
from dashinfer_vlm_core.errors import QueueFull
from dashinfer_vlm_core.kernels.delta_net import CHUNK
from dashinfer_vlm_core.media import Grid
from dashinfer_vlm_core.models.qwen2_vl.config import read_spec
from dashinfer_vlm_torch.kv_cache import KVAllocation, KVAllocator, KVCache
from dashinfer_vlm_torch.kv_cache_manager import KVCacheManager, KVCopy
from dashinfer_vlm_torch.prefix_hash import BLOCK_SIZE, PrefixHash
from dashinfer_vlm_torch.runner import _verify
from dashinfer_vlm_torch.scheduler import Scheduler
from dashinfer_vlm_torch.sequence import SequenceState
from dashinfer_vlm_torch.state_manager import NO_STATE
from tests.cases import cases

from .oracle import prompt, visual

IMAGE = visual(20, (1, 4, 5), 30, width=1)


def shared_tokens(one, other):
    """Return the tokens that the second request can reuse after the first was computed."""
    memory = KVCacheManager(1000, caching=True)
    first = memory.allocate(PrefixHash(one), len(one.token_ids))
    memory.mark_computed(first, len(one.token_ids))
    memory.free(first)
    return memory.allocate(PrefixHash(other), len(other.token_ids)).num_computed_tokens


def with_tokens(request, index, **changes):
    """Return the request with changes to the tokens of one span."""
    spans = list(request.spans)
    spans[index] = replace(spans[index], tokens=replace(spans[index].tokens, **changes))
    return replace(request, spans=tuple(spans))


def with_value(array, index, value):
    changed = array.copy()
    changed[..., index] = value
    return changed


# Prefix equality


def test_last_token_is_always_computed():
    assert shared_tokens(prompt(1, 48), prompt(1, 48)) == 47


@cases("position", [16, 17, 31, 32, 40, 46])
def test_first_different_token_ends_shared_prefix(position):
    other = prompt(1, 48)
    assert shared_tokens(prompt(1, 48), replace(other, token_ids=with_value(other.token_ids, position, 91))) == position


def test_less_than_one_block_is_not_shared():
    other = prompt(1, 48)
    assert shared_tokens(prompt(1, 48), replace(other, token_ids=with_value(other.token_ids, BLOCK_SIZE - 1, 91))) == 0


def test_image_is_shared_with_surrounding_text():
    assert shared_tokens(IMAGE, visual(20, (1, 4, 5), 30, width=1)) == len(IMAGE.token_ids) - 1


def test_another_image_digest_ends_shared_prefix():
    assert shared_tokens(IMAGE, with_tokens(IMAGE, 0, digest=bytes(32))) == 20


def test_another_grid_ends_shared_prefix():
    assert shared_tokens(IMAGE, with_tokens(IMAGE, 0, grid=Grid(1, 10, 8))) == 20


@pytest.mark.parametrize("axis", range(3))
def test_another_position_on_any_axis_ends_shared_prefix(axis):
    positions = IMAGE.positions.copy()
    positions[axis, 30] += 1
    assert shared_tokens(IMAGE, replace(IMAGE, positions=positions)) == 30


def test_another_offset_in_same_image_ends_shared_prefix():
    """The image starts again halfway, with matching positions."""
    (span,) = IMAGE.spans
    half = replace(span.tokens, embedding=span.tokens.embedding[:10])
    halves = tuple(replace(span, start=start, tokens=half) for start in (20, 30))
    assert shared_tokens(IMAGE, replace(IMAGE, spans=halves)) == 30


def test_image_and_video_of_same_digest_are_not_shared():
    still, moving = visual(20, (1, 4, 5), 3, width=1), visual(20, (5, 4, 1), 3, width=1)
    moving = replace(with_tokens(moving, 0, digest=still.spans[0].tokens.digest), positions=still.positions)
    assert shared_tokens(still, moving) == 20


def test_swapped_images_are_not_shared():
    both = visual(20, (1, 4, 5), 4, (1, 4, 5), 9, width=1)
    first, second = both.spans
    swapped = (replace(first, tokens=second.tokens), replace(second, tokens=first.tokens))
    assert shared_tokens(both, replace(both, spans=swapped)) == 20
    assert shared_tokens(both, with_tokens(both, 1, digest=bytes(32))) == 44


@pytest.mark.parametrize(
    ("other", "shared"),
    [("abcd", 20 + 3 * 12), ("abxc", 20 + 2 * 12), ("ab", 20 + 2 * 12), ("bca", 20), ("abc", 20 + 3 * 12 + 8)],
)
def test_video_shares_the_pairs_that_it_begins_with(other, shared):
    """A pair of frames is `12` tokens, and the text after the video has another position if the video is longer."""

    def video(units):
        request = visual(20, (len(units), 3, 4), 9, width=1)
        return with_tokens(request, 0, units=tuple(unit.encode() * 32 for unit in units), digest=bytes(32))

    assert shared_tokens(video("abc"), video(other)) == shared


def test_different_cache_salts_share_nothing():
    text, salted = prompt(1, 48), replace(prompt(1, 48), cache_salt="anna")
    assert shared_tokens(salted, salted) == 47
    for one, other in [(text, salted), (salted, text), (salted, replace(text, cache_salt="bert"))]:
        assert shared_tokens(one, other) == 0


def test_prefix_hash_includes_completion():
    whole = prompt(1, 60)
    prefix = PrefixHash(replace(whole, token_ids=whole.token_ids[:30], positions=whole.positions[:, :30]))
    for index in range(30, 60):
        prefix.append(int(whole.token_ids[index]), index)
    assert prefix.digests == PrefixHash(whole).digests
    assert prefix.common_length(PrefixHash(whole), 48) == 12


# Retention


def keep(memory, request, *, read=None):
    """Allocate a request, compute `read` tokens of its prompt and free it; return its allocation."""
    allocation = memory.allocate(PrefixHash(request), len(request.token_ids))
    memory.mark_computed(allocation, max(allocation.num_computed_tokens, read or len(request.token_ids)))
    memory.free(allocation)
    return allocation


def spans(memory):
    return [(allocation.start, allocation.stop) for allocation in memory._allocator.allocations]


def test_prefix_of_cached_sequence_is_not_cached_twice():
    memory = KVCacheManager(1000, caching=True)
    keep(memory, prompt(1, 64))
    keep(memory, prompt(1, 100))  # continues in the same rows
    assert spans(memory) == [(0, 100)]
    keep(memory, prompt(1, 70), read=70)
    assert memory.cached == 100
    apart = [memory.allocate(PrefixHash(prompt(2, length)), length) for length in (100, 64)]
    for allocation in apart:
        memory.mark_computed(allocation, allocation.rows)
    for allocation in reversed(apart):
        memory.free(allocation)
    assert memory.cached == 200


def test_least_recently_used_is_evicted_first_from_its_end():
    memory = KVCacheManager(300, caching=True)
    for content in (1, 2, 3):
        keep(memory, prompt(content, 100))
    memory.free(memory.allocate(PrefixHash(prompt(1, 100)), 100))  # using the oldest makes it the newest
    for content, left in ((4, 60), (5, 20)):
        assert memory.allocate(PrefixHash(prompt(content, 40)), 40).num_computed_tokens == 0
        assert [shared_with(memory, kept) for kept in (1, 2, 3)] == [99, left, 99]


def shared_with(memory, content):
    match = memory._find_prefix(PrefixHash(prompt(content, 100)))
    return match.num_tokens if match else 0


def test_copy_source_is_not_evicted_for_its_own_request():
    """The rows could be taken from the source or from others."""
    memory = KVCacheManager(200, caching=True)
    source, _ = keep(memory, prompt(1, 100)), keep(memory, prompt(2, 100))
    other = prompt(1, 90)
    allocation = memory.allocate(
        PrefixHash(replace(other, token_ids=with_value(other.token_ids, slice(50, 90), 1))), 90
    )
    assert allocation.num_computed_tokens == 50
    assert (source.start, source.num_computed_tokens) == (0, 100)


def test_copied_rows_may_be_overwritten_by_next_request():
    """The first request copies rows that are then assigned to the second one."""
    memory = KVCacheManager(300, caching=True)
    for content in (1, 2):
        keep(memory, prompt(content, 100))
    for content, length in ((1, 90), (2, 100)):
        other = prompt(content, length)
        memory.allocate(PrefixHash(replace(other, token_ids=with_value(other.token_ids, slice(50, None), 1))), length)
    assert memory.take_copies() == [KVCopy(0, 200, 50), KVCopy(100, 0, 50)]
    assert memory.take_copies() == []


def test_source_is_reused_in_place_without_other_space():
    memory = KVCacheManager(150, caching=True)
    source = keep(memory, prompt(1, 100))
    other = prompt(1, 90)
    allocation = memory.allocate(
        PrefixHash(replace(other, token_ids=with_value(other.token_ids, slice(50, 90), 1))), 90
    )
    assert (allocation, allocation.num_computed_tokens, memory.take_copies()) == (source, 50, [])
    assert shared_with(memory, 1) == 50


def test_failed_allocation_changes_nothing():
    memory = KVCacheManager(200, caching=True)
    running = memory.allocate(PrefixHash(prompt(2, 80)), 80)
    keep(memory, prompt(1, 100))
    assert memory.allocate(PrefixHash(prompt(1, 130)), 130) is None
    assert not memory.grow(running, 201)
    assert shared_with(memory, 1) == 99
    assert memory.take_copies() == []


def test_index_is_empty_when_nothing_is_cached():
    memory = KVCacheManager(400, caching=True)
    for content in range(9):
        keep(memory, prompt(content, 100))
    memory.free(memory.allocate(PrefixHash(prompt(99, 400)), 400), keep=False)
    assert (memory._index, memory.cached, memory.used, memory._allocator.allocations) == ({}, 0, 0, [])


def test_digest_depends_on_every_preceding_byte():
    """A changed bit in the first block changes every following digest."""
    request = prompt(1, 64)
    digests = PrefixHash(request).digests
    other = PrefixHash(replace(request, token_ids=with_value(request.token_ids, 0, request.token_ids[0] ^ 1))).digests
    assert len(digests) == 4
    assert not set(digests) & set(other)


# Rows


def allocate(allocator, rows, leaving=()):
    made = KVAllocation(prefix=PrefixHash(prompt(0, 1)))
    start = allocator.find_start(made, rows, leaving)
    if start is not None:
        allocator.assign(made, start, rows)
    return made if start is not None else None


def test_allocation_takes_tightest_gap():
    allocator = KVAllocator(100)
    large, _, small, _ = (allocate(allocator, rows) for rows in (30, 10, 20, 40))
    allocator.remove(large)
    allocator.remove(small)
    assert allocate(allocator, 15).start == small.start
    assert allocate(allocator, 25).start == large.start
    assert allocate(allocator, 25) is None


def test_allocation_grows_in_place_if_possible():
    allocator = KVAllocator(100)
    first, second = allocate(allocator, 30), allocate(allocator, 30)
    assert allocator.find_start(second, 70, ()) == 30
    assert allocator.find_start(first, 40, ()) == 60
    assert allocator.find_start(first, 50, ()) is None
    assert allocator.find_start(first, 100, [second]) == 0


def test_first_freed_range_is_used_from_its_end():
    allocator = KVAllocator(100)
    allocations = [allocate(allocator, 20) for _ in range(5)]
    order = [allocations[index] for index in (4, 1, 3, 0, 2)]
    assert (
        allocator.find_start(KVAllocation(prefix=allocations[0].prefix), 30, order) == 70
    )  # 4 and 3 are adjacent; 1 need not be evicted
    assert allocator.find_start(KVAllocation(prefix=allocations[0].prefix), 50, order) == 50
    assert allocator.find_start(KVAllocation(prefix=allocations[0].prefix), 101, order) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_row_copies_may_overlap(oracle, dtype):
    cache = KVCache(read_spec(oracle.folder).text, 50, device="cpu", dtype=dtype)
    tensors = [cache.pool] if cache.scales is None else [cache.pool, cache.scales]
    assert len(tensors) == (2 if dtype == torch.int8 else 1)
    for source, target, rows in [(0, 30, 20), (10, 3, 30), (3, 10, 30), (5, 5, 9)]:
        before = [tensor.copy_(torch.randint(-127, 128, tensor.shape)).clone() for tensor in tensors]
        cache.copy_rows(source, target, rows)
        for tensor, expected in zip(tensors, before, strict=True):
            expected[:, :, target : target + rows] = expected[:, :, source : source + rows].clone()
            assert torch.equal(tensor, expected)


# Scheduler and cache together


class Pool:
    """Simulates the model: each row and each recurrent state stores a hash of its whole prefix, which determines the
    next token, one of `vocabulary` tokens. With few of them, n-grams repeat, and about as many drafts are rejected as
    accepted."""

    def __init__(self, vocabulary=90, **options):
        self.vocabulary = vocabulary
        self.scheduler = Scheduler(max_waiting=3, **options)
        self.budget = options["prefill_chunk"]
        self.rows = [None] * options["kv_tokens"]
        self.states = [None] * options["state_slots"]
        self.active = []
        self.finished = []

    def handle(self, event):
        """Process an event: a request arrives; a number of steps runs; a request is canceled, (number,); or a list of
        events during a step."""
        if isinstance(event, DecodeRequest):
            self.add(SequenceState(event, stop=()))
        elif isinstance(event, int):
            self.run_steps(event)
        elif isinstance(event, tuple):
            self.cancel(*event)
        elif self.scheduler.busy:
            self.step(events_during=event)
        self.check()

    def add(self, sequence):
        try:
            self.scheduler.add(sequence)
            self.active.append(sequence)
        except QueueFull:
            assert len(self.scheduler._waiting) == 3

    def cancel(self, number):
        if self.active:
            self.scheduler.remove(self.active.pop(number % len(self.active)))

    def run_steps(self, steps):
        while steps and self.scheduler.busy:
            self.step()
            self.check()
            steps -= 1

    def step(self, *, events_during=()):
        """Run a step, and events during that step."""
        moves, chunks = self.scheduler.schedule()
        assert chunks
        assert all(chunk.end <= chunk.sequence.allocation.rows for chunk in chunks)
        decoding = {chunk.sequence for chunk in chunks if chunk.sequence.is_decoding}
        budget = (self.budget + 1) // 2 if decoding else self.budget
        if self.states:
            budget = max(budget, 2 * CHUNK)  # the oldest and the shortest sequence compute a whole chunk
        assert sum(chunk.stop - chunk.start for chunk in chunks if chunk.sequence not in decoding) <= budget
        assert decoding == {sequence for sequence in self.scheduler._running if sequence.is_decoding}
        if self.states:
            self.check_slots(chunks)
        for source, target, rows in moves:
            self.rows[target : target + rows] = self.rows[source : source + rows]
        for event in events_during:
            self.handle(event)
        choices = {}
        for chunk in chunks:
            sequence, start, stop, draft, source, target, saved = chunk
            expected, row = row_hashes(sequence, draft.tokens), sequence.first_row
            assert self.rows[row : row + start] == expected[:start]
            self.rows[row + start : row + chunk.end] = expected[start : chunk.end]
            if chunk.needs_logits:
                sampled = [Token(id=name % self.vocabulary) for name in expected[stop - 1 :]]
                choices[sequence] = _verify(chunk, sampled)
            if self.states:
                assert source == NO_STATE if start == 0 else self.states[source] == expected[start - 1]
                self.write_states(saved, expected)
                self.states[target] = expected[stop - 1 + len(choices.get(sequence, "?")) - 1]
        for sequence, token in self.scheduler.update(chunks, choices):
            if token.finish_reason:
                self.active.remove(sequence)
                self.finished.append(sequence)

    def write_states(self, saved, expected):
        for position, slot in saved:
            self.states[slot] = expected[position - 1]

    def check_slots(self, chunks):
        """Check that a step writes each slot once and changes none that is read, and that steps of prefills end with
        chunks."""
        targets = [slot for chunk in chunks for slot in (chunk.target, *dict(chunk.saved).values())]
        used = {chunk.source for chunk in chunks} | {state.slot for state in self.scheduler._states._cached.values()}
        assert len(set(targets)) == len(targets)
        assert not used & set(targets)
        for chunk in chunks:
            assert chunk.is_decoding == chunk.sequence.is_decoding
            assert chunk.needs_logits or chunk.sequence.boundaries.at_or_before(chunk.stop) == chunk.stop

    def check(self):
        """Check the invariants between any two steps."""
        if self.states:
            states = self.scheduler._states
            slots = [sequence.state_slots for sequence in self.scheduler._running]
            users = [state.slot for state in states._cached.values()]
            users += [slot for each in slots for slot in (each.current, each.spare, *each.saved.values())]
            assert states._num_users == [users.count(slot) for slot in range(len(self.states))]
            assert sorted(states._free) == [slot for slot in range(len(self.states)) if slot not in users]
        memory = self.scheduler._kv_cache_manager
        allocations = memory._allocator.allocations
        assert all(one.stop <= other.start for one, other in pairwise(allocations))
        assert all(
            allocation.start >= 0 and allocation.rows and allocation.stop <= memory._allocator.size
            for allocation in allocations
        )
        assert {allocation for allocation in allocations if not allocation.is_cached} == set(
            self.scheduler._running.values()
        )
        assert sum(allocation.rows for allocation in allocations) == memory.used + memory.cached
        assert set(memory._cached.values()) == {allocation for allocation in allocations if allocation.is_cached}
        listed = {}
        for allocation in allocations:
            assert allocation.num_indexed_blocks == (
                allocation.num_computed_tokens // BLOCK_SIZE if memory._caching else 0
            )
            for digest in allocation.prefix.digests[: allocation.num_indexed_blocks]:
                listed.setdefault(digest, set()).add(allocation)
        assert {digest: set(allocations) for digest, allocations in memory._index.items()} == listed
        for key, allocation in memory._cached.items():
            assert [other for other in listed[key] if other.is_cached] == [allocation]


def row_hashes(sequence, draft=()):
    """Return a hash for each token of a sequence and a draft, of everything that its keys and values depend on."""
    request, name, found = sequence.request, hash(sequence.request.cache_salt), []
    inside = {
        span.start + offset: (span.tokens.digest, span.tokens.grid, offset)
        for span in request.spans
        for offset in range(span.stop - span.start)
    }
    tokens = [*sequence.ids[: sequence.length].tolist(), *draft]
    positions = sequence.positions(0, len(tokens))
    for index, token in enumerate(tokens):
        name = hash((name, token, tuple(positions[:, index].tolist()), inside.get(index)))
        found.append(name)
    return found


def expected_output(sequence, vocabulary):
    """Return the output of a sequence that runs alone, without a cache and drafts."""
    alone = SequenceState(sequence.request, stop=())
    while len(alone.output_ids) < alone.max_tokens:
        alone.append(row_hashes(alone)[-1] % vocabulary)
    return alone.output_ids


PARTS = (17, (1, 3, 4), 9, (1, 2, 3), 20, (2, 2, 3), 30, (1, 4, 4), 60)


def with_responses(request, number):
    """Return the request with up to `number` responses, which begin after token 92."""
    ids = request.token_ids.copy()
    headers = [index for index in (40, 130, 150)[:number] if index < len(ids) and ids[index] < 90]
    ids[headers] = 92
    return replace(request, token_ids=ids, response_boundaries=tuple(index + 1 for index in headers))


requests = st.builds(
    lambda content, parts, tail, length, salt, responses: with_responses(
        replace(
            visual(*PARTS[:parts], tail, width=1, content=content, max_tokens=length, ignore_eos=True), cache_salt=salt
        ),
        responses,
    ),
    responses=st.integers(0, 3),
    content=st.integers(0, 1),
    parts=st.integers(0, len(PARTS)) | st.sampled_from([8, 9]),
    tail=st.integers(1, 40),
    length=st.integers(1, 120),
    salt=st.sampled_from(["", "", "", "anna"]),
)
arrivals = st.one_of(requests, requests, st.tuples(st.integers(0, 5)))
events = st.lists(st.one_of(arrivals, st.integers(1, 30), st.lists(arrivals, max_size=3)), min_size=5, max_size=25)


@pytest.mark.slow
@given(
    events=events,
    kv_tokens=st.integers(390, 790),
    batch=st.integers(1, 5),
    chunk=st.integers(1, 200),
    caching=st.sampled_from([True, True, True, False]),
    vocabulary=st.sampled_from([90, 3]),
    speculative=st.booleans(),
    state_slots=st.sampled_from([0, 2, 3, 7, 20]),
)
def test_sequences_read_only_their_rows_and_states_and_all_finish(
    *, events, kv_tokens, batch, chunk, caching, vocabulary, speculative, state_slots
):
    pool = Pool(
        vocabulary=vocabulary,
        kv_tokens=kv_tokens,
        max_batch_size=batch,
        prefill_chunk=chunk,
        prefix_cache=caching,
        speculative=speculative,
        state_slots=state_slots,
    )
    for event in events:
        pool.handle(event)
    pool.run_steps(20_000)
    assert not pool.active
    assert not pool.scheduler.busy
    for sequence in pool.finished:
        assert sequence.output_ids == expected_output(sequence, vocabulary)
        assert 0 <= sequence.num_cached_tokens < sequence.prompt_length
    assert (pool.scheduler.stats.kv_used, pool.scheduler.stats.states_used) == (0, 0)


def test_prefix_lookup_cost_with_many_equal_prefixes():
    """Count lookups for a block shared by thousands of allocations and prompts of thousands of tokens."""
    memory = KVCacheManager(40_000, caching=True)
    base = np.tile(prompt(1, 16).token_ids, 1)
    for tail in range(1000):
        request = prompt(2, 33)
        request.token_ids[:16], request.token_ids[16] = base, tail % 90
        request.token_ids[17] = tail // 90
        keep(memory, request)
    lookups = []

    class CountingDict(dict):
        def __contains__(self, key):
            lookups.append(key)
            return super().__contains__(key)

    memory._index = CountingDict(memory._index)
    long = prompt(3, 4000)
    long.token_ids[:16] = base
    assert memory._find_prefix(PrefixHash(long)).num_tokens >= 16
    assert 0 < len(lookups) <= 9
