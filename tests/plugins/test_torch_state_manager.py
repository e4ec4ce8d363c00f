"""Slots of recurrent states, without a model: roles, checkpoints, eviction, and scheduling with them."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest

from dashinfer_vlm_core.decoders import Token
from dashinfer_vlm_core.errors import DecoderFailed
from dashinfer_vlm_torch.chunk_boundaries import ChunkBoundaries
from dashinfer_vlm_torch.prefix_hash import PrefixHash
from dashinfer_vlm_torch.proposer import Draft
from dashinfer_vlm_torch.scheduler import Scheduler
from dashinfer_vlm_torch.sequence import SequenceState
from dashinfer_vlm_torch.state_manager import NO_STATE, StateManager, checkpoints

from .oracle import prompt, text, visual

SHORT = prompt(0, 10)
"""A prompt without checkpoints of its own."""

REGULAR = ChunkBoundaries(())


def compute(states, request, *, steps, at=()):
    """Run a sequence that is at the position of each step after it, with checkpoints at `at`; return its slots."""
    slots = states.allocate(SHORT, PrefixHash(request), REGULAR, set(at), 0)
    for position in steps:
        states.advance(slots, position)
    return slots


def places(request):
    return checkpoints(request, ChunkBoundaries(request.response_boundaries))


def found(states, request):
    return states.usable_tokens(PrefixHash(request), len(request.token_ids) - 1)


# Boundaries


@pytest.mark.parametrize(
    ("starts", "chunks"),
    [
        ((), [64, 64, 64, 8]),
        ((0,), [64, 64, 64, 8]),
        ((64,), [64, 64, 64, 8]),
        ((70, 75, 150), [64, 6, 5, 64, 11, 50]),
        ((199,), [64, 64, 64, 7, 1]),
    ],
)
def test_chunks_begin_with_responses_and_have_at_most_64_tokens(starts, chunks):
    boundaries = ChunkBoundaries(starts)
    assert list(boundaries.chunks(0, 200)) == chunks
    ends = [0, *accumulate(chunks)]
    for position in range(200):
        assert boundaries.at_or_before(position) == max(end for end in ends if end <= position)
        assert boundaries.after(position) >= min(end for end in ends if end > position)


# Slots


def test_steps_alternate_between_two_slots():
    states = StateManager(2, 4, caching=True)
    slots = states.allocate(SHORT, PrefixHash(prompt(1, 10)), REGULAR, set(), 0)
    assert slots.current == NO_STATE
    written = []
    for position in range(1, 5):
        written.append(slots.spare)
        states.advance(slots, position)
        assert slots.current == written[-1] != slots.spare
    assert written in ([0, 1, 0, 1], [1, 0, 1, 0])
    states.free(slots, keep=True)
    assert (states.used, states.cached) == (0, 0)


def test_cached_state_is_read_by_many_and_never_written():
    states = StateManager(9, 4, caching=True)
    first = compute(states, prompt(1, 100), steps=[64], at=[64])
    cached = first.current
    readers = [states.allocate(SHORT, PrefixHash(prompt(1, 100)), REGULAR, set(), 64) for _ in range(3)]
    assert {slots.current for slots in readers} == {cached}
    assert len({slots.spare for slots in (first, *readers)} | {cached}) == 5
    for slots in (first, *readers):
        states.advance(slots, 65)
        assert cached not in (slots.current, slots.spare)
    assert (states.used, states.cached) == (8, 1)


def test_checkpoint_is_dropped_if_sequences_need_all_slots():
    states = StateManager(4, 4, caching=True)
    running = [compute(states, prompt(content, 100), steps=[64], at=[64]) for content in (1, 2)]
    assert states.cached == 2
    for slots in running:
        states.advance(slots, 65)
    assert (states.used, states.cached) == (4, 0)


def test_least_recently_used_state_is_evicted():
    states = StateManager(5, 4, caching=True)
    for content in (1, 2, 3):
        states.free(compute(states, prompt(content, 100), steps=[64], at=[64]), keep=True)
    reader = states.allocate(SHORT, PrefixHash(prompt(1, 100)), REGULAR, set(), 64)
    states.free(reader, keep=True)
    compute(states, prompt(4, 100), steps=[1, 2])
    other = compute(states, prompt(5, 100), steps=[1])
    assert [found(states, prompt(content, 100)) for content in (1, 2, 3)] == [64, 0, 0]
    states.free(other, keep=True)


def test_state_is_not_evicted_while_it_is_read():
    states = StateManager(4, 4, caching=True)
    first = compute(states, prompt(1, 200), steps=[64], at=[64])
    reader = states.allocate(SHORT, PrefixHash(prompt(1, 200)), REGULAR, set(), 64)
    states.advance(first, 128)  # its state is used more recently, but only by the cache after the next step
    states.advance(first, 129)
    assert found(states, prompt(1, 200)) == 64
    assert reader.current not in (first.current, first.spare)


def test_only_newest_state_is_kept_after_checkpoints():
    states = StateManager(9, 4, caching=True)
    request = prompt(1, 300)
    compute(states, request, steps=[64, 128, 192, 200, 256, 257], at=[64])
    assert (states.cached, found(states, request), found(states, prompt(1, 256))) == (2, 256, 64)


def test_state_of_another_sequence_is_not_dropped_with_the_newest():
    states = StateManager(9, 4, caching=True)
    compute(states, prompt(1, 300), steps=[64, 128], at=[64, 128])
    compute(states, prompt(1, 300), steps=[128, 192], at=[64])
    assert (states.cached, found(states, prompt(1, 190))) == (3, 128)


@pytest.mark.parametrize(("position", "keep", "usable"), [(128, True, 128), (131, True, 131), (128, False, 0)])
def test_last_state_of_sequence_is_kept_if_valid(position, keep, usable):
    states = StateManager(9, 4, caching=True)
    slots = compute(states, prompt(1, 300), steps=[64, position], at=[64, 192])
    states.free(slots, keep=keep)
    assert (states.used, found(states, prompt(1, 300))) == (0, usable)


def test_state_at_the_end_of_a_prompt_is_not_kept():
    """It has other bits than that of a longer prompt, which would not be cut there."""
    states = StateManager(9, 4, caching=True)
    request = prompt(1, 100)
    slots = states.allocate(request, PrefixHash(request), REGULAR, set(), 0)
    for position in (64, 100):
        states.advance(slots, position)
    states.free(slots, keep=True)
    assert found(states, prompt(1, 130)) == 64


def test_states_within_a_step_take_slots_that_sequences_do_not_need():
    states = StateManager(6, 2, caching=True)
    request = prompt(1, 300)
    slots = states.allocate(SHORT, PrefixHash(request), REGULAR, {64, 128, 192}, 0)
    saved = dict(states.reserve(slots, 0, 300))
    assert set(saved) == {192, 128}
    assert len({*saved.values(), slots.spare}) == 3
    other = states.allocate(SHORT, PrefixHash(prompt(2, 300)), REGULAR, {64}, 0)
    assert states.reserve(other, 0, 300) == ()
    states.advance(slots, 300)
    assert found(states, request) == 192
    assert dict(states.reserve(other, 0, 300)).keys() == {64}
    states.free(other, keep=True)
    states.free(slots, keep=True)
    assert (states.used, states.cached, found(states, prompt(2, 300))) == (0, 3, 0)


def test_states_are_found_by_content_and_salt():
    states = StateManager(9, 4, caching=True)
    request = prompt(1, 100)
    compute(states, request, steps=[64], at=[64])
    changed = text(*request.token_ids[:63].tolist(), 91, *request.token_ids[64:].tolist())
    assert [found(states, other) for other in (request, changed, replace(request, cache_salt="anna"))] == [64, 0, 0]


def test_nothing_is_cached_without_prefix_cache():
    states = StateManager(4, 4, caching=False)
    states.free(compute(states, prompt(1, 100), steps=[64], at=[64]), keep=True)
    assert (states.used, states.cached) == (0, 0)


def test_checkpoints_follow_media_and_precede_response():
    assert places(prompt(1, 64)) == set()
    assert places(prompt(1, 65)) == {64}
    assert places(replace(prompt(1, 99), response_boundaries=(70, 95))) == {95}
    image, video = (1, 8, 8), (2, 8, 8)
    assert places(visual(10, image, 10, video, 90, width=1)) == {64, 192, 256}
    request = visual(10, video, 90, width=1)
    (span,) = request.spans
    groups = (replace(span, length=64), replace(span, start=74, row=64))  # a video with a timestamp per group
    assert places(replace(request, spans=groups)) == {128, 192}


# Scheduling


def scheduler(**options):
    return Scheduler(
        **{"kv_tokens": 2000, "max_batch_size": 4, "max_waiting": 4, "prefill_chunk": 512, "state_slots": 20} | options
    )


def sequence(content, length, **sampling):
    return SequenceState(prompt(content, length, **{"max_tokens": 4} | sampling), stop=(95,))


def step(queue, token=1):
    """Run a step; return (start, stop) of each chunk by sequence."""
    chunks = queue.schedule().chunks
    queue.update(chunks, {chunk.sequence: (Token(id=token),) for chunk in chunks if chunk.needs_logits})
    return {chunk.sequence: (chunk.start, chunk.stop) for chunk in chunks}


def run(queue, one):
    queue.add(one)
    chunks = []
    while queue.busy:
        chunks += step(queue).values()
    return chunks


def test_steps_of_a_prefill_end_with_chunks():
    queue = scheduler(prefill_chunk=200)
    one = SequenceState(visual(10, (1, 8, 8), 300, width=1, max_tokens=1), stop=())  # 374 tokens
    assert run(queue, one) == [(0, 192), (192, 374)]


def test_oldest_and_shortest_prompt_compute_a_chunk_in_each_step():
    queue = scheduler(prefill_chunk=10)
    first, second, third = sequence(1, 150), sequence(2, 80), sequence(3, 30)
    for one in (first, second, third):
        queue.add(one)
    assert step(queue) == {first: (0, 64), third: (0, 30)}
    assert step(queue) == {first: (64, 128), second: (0, 64), third: (30, 31)}
    assert step(queue) == {first: (128, 150), second: (64, 80), third: (31, 32)}


def test_batch_is_limited_by_slots():
    queue = scheduler(state_slots=5)
    for content in range(3):
        queue.add(sequence(content, 10))
    assert (queue.stats.running, queue.stats.waiting, queue.stats.states_size) == (2, 1, 5)


def test_next_turn_continues_from_the_end_of_the_output():
    queue = scheduler()
    turn = sequence(1, 90, max_tokens=50)
    run(queue, turn)
    assert queue.stats.states_cached == 3
    ids = [*turn.ids[:139].tolist(), *prompt(3, 30).token_ids.tolist()]
    assert run(queue, SequenceState(text(*ids, max_tokens=1), stop=())) == [(139, 169)]
    assert (queue.stats.hits, queue.stats.cached_tokens) == (1, 139)


def test_state_is_kept_where_an_earlier_prompt_differed():
    """The prompts share 150 tokens; the second one shows that, and the third one finds the state."""
    queue = scheduler()
    shared = prompt(1, 150).token_ids.tolist()
    prompts = [text(*shared, *prompt(content, 100).token_ids.tolist(), max_tokens=1) for content in (2, 3, 4)]
    chunks = [run(queue, SequenceState(request, stop=())) for request in prompts]
    assert chunks == [[(0, 250)], [(0, 250)], [(128, 250)]]


def test_next_turn_continues_where_the_last_response_began():
    """The response is not repeated as it was generated."""
    queue = scheduler()
    first = replace(prompt(1, 215, max_tokens=33), response_boundaries=(210,))
    assert run(queue, SequenceState(first, stop=())) == [(0, 215), *((n, n + 1) for n in range(215, 247))]
    ids = [*first.token_ids[:212].tolist(), *prompt(2, 60).token_ids.tolist()]
    for length, start in ((272, 210), (272, 210), (280, 272)):
        turn = replace(text(*ids, *[5] * (length - 272), max_tokens=1), response_boundaries=(210, 272))
        assert run(queue, SequenceState(turn, stop=())) == [(start, length)]


def test_equal_concurrent_prompts_share_checkpoints():
    first, second = sequence(1, 300), sequence(1, 300)
    queue = scheduler()
    queue.add(first)
    queue.add(second)
    assert step(queue) == {first: (0, 300)}
    assert step(queue) == {first: (300, 301), second: (256, 300)}
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 256)


def test_prompt_does_not_wait_for_tokens_after_the_last_checkpoint():
    """Most of their tokens are equal, but no state will be cached between them."""
    queue = scheduler()
    first, second = sequence(1, 64), sequence(1, 64)
    queue.add(first)
    queue.add(second)
    assert step(queue) == {first: (0, 64), second: (0, 64)}


def test_preempted_sequence_continues_where_it_was():
    queue = scheduler(kv_tokens=400)
    filler, old, young = sequence(3, 150), sequence(1, 90, max_tokens=120), sequence(2, 90, max_tokens=200)
    queue.add(filler)  # so that the young one is placed in front of the old one, which grows
    queue.add(old)
    queue.remove(filler)
    queue.add(young)
    while not queue.stats.preemptions:
        step(queue)
    chunks = step(queue)
    while young not in chunks:
        chunks = step(queue)
    assert chunks[young] == (young.length - 2, young.length - 1)
    assert len(old.output_ids) == 120


def test_state_after_drafts_is_that_of_the_computed_tokens():
    queue = scheduler(speculative=True)
    one = SequenceState(text(*[5] * 80, max_tokens=60), stop=())
    queue.add(one)
    longest = 0
    while queue.busy:
        (chunk,) = queue.schedule().chunks
        longest = max(longest, len(chunk.draft.tokens))
        accepted = (Token(id=5),) * (len(chunk.draft.tokens) // 2)
        queue.update([chunk], {one: (*accepted, Token(id=5))})
        if one.state_slots:
            assert {state.num_tokens for state in queue._states._cached.values()} <= {64, 128}
    assert longest > 1
    assert queue._states.usable_tokens(one.prefix, 139) == 139


def test_state_before_a_draft_is_kept_if_the_sequence_ends_within_it():
    queue = scheduler(speculative=True)
    one = sequence(1, 100, max_tokens=60)
    queue.add(one)
    step(queue)
    chunks = [chunk._replace(draft=Draft((5, 95, 5))) for chunk in queue.schedule().chunks]
    queue.update(chunks, {one: tuple(Token(id=token) for token in (5, 95, 5, 5))})
    assert len(one.output_ids) == 3
    assert queue._states.usable_tokens(one.prefix, 102) == 64


def test_states_of_failed_sequence_are_not_cached():
    queue = scheduler(prefill_chunk=128)
    queue.add(one := sequence(1, 200))
    step(queue)
    assert one.num_computed_tokens == 128
    step(queue)
    queue.update(queue.schedule().chunks, {one: DecoderFailed("broken")})
    assert (queue.stats.states_used, queue.stats.states_cached) == (0, 0)
