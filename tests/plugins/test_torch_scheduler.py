"""Admission, chunked prefill, order, preemption and memory, without a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dashinfer_vlm_core.errors import DecoderFailed, QueueFull
from dashinfer_vlm_torch.kv_cache_manager import KVCopy
from dashinfer_vlm_torch.scheduler import ROOM, SampledToken, Scheduler, SequenceState

from .oracle import prompt


def run(length, max_tokens=4, *, content=0, **sampling):
    return SequenceState.of(prompt(content, length, max_tokens=max_tokens, **sampling), stop=(95,))


def scheduler(**options):
    return Scheduler(**({"kv_tokens": 100, "max_batch_size": 4, "max_waiting": 2, "prefill_chunk": 8} | options))


def step(scheduler, token=1):
    """Plan and commit one step in which every run that was read whole gets `token`."""
    chunks = scheduler.schedule().chunks
    replies = scheduler.update(chunks, {chunk.sequence: SampledToken(token) for chunk in chunks if chunk.last})
    return [(chunk.sequence, chunk.start, chunk.stop) for chunk in chunks], replies


def held(scheduler):
    stats = scheduler.stats
    return {"running": stats.running, "waiting": stats.waiting, "kv_used": stats.kv_used, "kv_size": stats.kv_size}


def test_a_prompt_is_read_in_chunks_then_decoded_token_by_token():
    one = run(20, max_tokens=3)
    queue = scheduler()
    queue.add(one)
    steps = [step(queue) for _ in range(5)]
    read = [(0, 8), (8, 16), (16, 20), (20, 21), (21, 22)]
    assert [chunks for chunks, _ in steps] == [[(one, start, stop)] for start, stop in read]
    finishes = [[token.finish_reason for _, token in replies] for _, replies in steps]
    assert finishes == [[], [], [None], [None], ["length"]]
    assert not queue.busy


def test_decoding_goes_on_beside_a_long_prompt():
    short, long = run(3), run(40)
    queue = scheduler()
    queue.add(short)
    step(queue)
    queue.add(long)
    chunks, replies = step(queue)
    assert chunks == [(short, 3, 4), (long, 0, 4)]  # half a chunk, so that the answer is not held up for long
    assert [one for one, _ in replies] == [short]


def test_prompts_share_the_budget_of_a_step_in_order():
    runs = [run(5), run(6), run(7)]
    queue = scheduler()
    for one in runs:
        queue.add(one)
    assert step(queue)[0] == [(runs[0], 0, 5), (runs[1], 0, 3)]
    assert step(queue)[0] == [(runs[0], 5, 6), (runs[1], 3, 6), (runs[2], 0, 1)]


def test_a_large_request_is_not_overtaken():
    """The third would fit, but the second came first."""
    first, large, small = run(60), run(70), run(5)
    queue = scheduler()
    for one in (first, large, small):
        queue.add(one)
    assert [chunk.sequence for chunk in queue.schedule().chunks] == [first]
    assert held(queue) == {"running": 1, "waiting": 2, "kv_used": 64, "kv_size": 100}
    queue.remove(first)
    assert [one for one, _, _ in step(queue)[0]] == [large, small]


def test_a_full_queue_refuses_and_keeps_its_place_free():
    queue = scheduler(max_batch_size=1, max_waiting=1)
    running, waiting = run(5), run(5)
    queue.add(running)
    queue.add(waiting)
    with pytest.raises(QueueFull) as refusal:
        queue.add(run(5))
    assert refusal.value.retryable
    queue.remove(waiting)
    queue.add(run(5))


def test_with_no_waiting_allowed_a_free_place_is_still_taken():
    queue = scheduler(max_batch_size=1, max_waiting=0)
    queue.add(run(5))
    with pytest.raises(QueueFull):
        queue.add(run(5))


def test_a_removed_run_is_passed_over_by_the_step_under_way():
    gone, stays = run(4), run(4)
    queue = scheduler()
    queue.add(gone)
    queue.add(stays)
    chunks = queue.schedule().chunks
    queue.remove(gone)
    assert queue.stats.kv_used == stays.max_len
    replies = queue.update(chunks, {gone: SampledToken(1), stays: SampledToken(1)})
    assert [one for one, _ in replies] == [stays]
    assert gone.output_ids == []


def test_a_failed_run_frees_what_it_held():
    one = run(4)
    queue = scheduler()
    queue.add(one)
    ((_, reply),) = queue.update(queue.schedule().chunks, {one: DecoderFailed("broken")})
    assert isinstance(reply, DecoderFailed)
    assert held(queue) == {"running": 0, "waiting": 0, "kv_used": 0, "kv_size": 100}


def test_answers_end_as_their_sampling_says():
    ends = {
        "own": run(2, 9),
        "ignored": run(2, 2, ignore_eos=True),
        "asked": run(2, 9, stop_token_ids=(7,), ignore_eos=True),
    }
    queue = scheduler()
    for one in ends.values():
        queue.add(one)
    first = dict(step(queue, token=95)[1])
    second = dict(step(queue, token=7)[1])
    assert first[ends["own"]].finish_reason == "stop"
    assert (first[ends["ignored"]].finish_reason, second[ends["ignored"]].finish_reason) == (None, "length")
    assert (first[ends["asked"]].finish_reason, second[ends["asked"]].finish_reason) == (None, "stop")


def test_seeds_of_any_size_are_taken():
    assert run(1, seed=-1).seed == 2**64 - 1
    assert run(1, seed=2**64 + 5).seed == 5
    assert run(1).seed != run(1).seed


def test_clear_returns_all_runs():
    queue = scheduler(max_batch_size=2)
    runs = [run(5) for _ in range(4)]
    for one in runs:
        queue.add(one)
    assert queue.clear() == runs
    assert not queue.busy
    assert queue.stats.kv_used == 0


# Who reads first


def test_a_short_prompt_does_not_wait_for_a_long_one():
    """The long one goes on at half speed at least."""
    long, short = run(80, content=1), run(6, content=2)
    queue = scheduler(kv_tokens=200)
    queue.add(long)
    step(queue)
    queue.add(short)
    assert step(queue)[0] == [(long, 8, 12), (short, 0, 4)]
    chunks, replies = step(queue)
    assert chunks == [(long, 12, 18), (short, 4, 6)]
    assert [one for one, _ in replies] == [short]


def test_a_long_prompt_is_not_held_up_by_a_stream_of_short_ones():
    long = run(80, content=1)
    queue = scheduler(kv_tokens=2000, max_batch_size=30)
    queue.add(long)
    for content in range(2, 22):
        queue.add(run(8, max_tokens=1, content=content))
        step(queue)
    assert long.output_ids


def test_a_prompt_that_another_run_is_reading_is_read_once():
    first, second = run(40), run(40)
    queue = scheduler(prefill_chunk=30, kv_tokens=200)
    queue.add(first)
    queue.add(second)
    read = [step(queue)[0] for _ in range(3)]
    assert read == [[(first, 0, 30)], [(first, 30, 40)], [(first, 40, 41), (second, 39, 40)]]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 39)
    assert queue.stats.cached_tokens == 39


def test_without_a_prefix_cache_nobody_waits_for_another_to_read():
    queue = scheduler(kv_tokens=1000, prefill_chunk=512, prefix_cache=False)
    for _ in range(4):
        queue.add(run(32))
    assert len(queue.schedule().chunks) == 4


def test_who_has_mostly_something_else_to_read_does_not_wait():
    """They have their first 16 tokens in common."""
    one, other = run(60), run(60)
    other.request.token_ids[16:] = 1
    other = SequenceState.of(other.request, stop=())
    queue = scheduler(prefill_chunk=120, kv_tokens=200)
    queue.add(one)
    queue.add(other)
    assert queue.schedule().chunks == [(one, 0, 60), (other, 0, 60)]


def test_if_the_run_that_reads_ahead_is_removed_its_follower_goes_on_where_it_was():
    first, second = run(60), run(60)
    queue = scheduler(prefill_chunk=30, kv_tokens=200)
    queue.add(first)
    queue.add(second)
    step(queue)
    queue.remove(first)
    assert step(queue)[0] == [(second, 30, 60)]


# Memory


def test_a_run_is_admitted_with_what_it_needs_and_grows():
    one, others = run(30, max_tokens=500), [run(30, max_tokens=500, content=content) for content in (1, 2)]
    queue = scheduler(kv_tokens=540, prefill_chunk=100)
    queue.add(one)
    assert queue.stats.kv_used == 30 + ROOM
    for other in others:
        queue.add(other)
    assert held(queue) == {"running": 3, "waiting": 0, "kv_used": 3 * (30 + ROOM), "kv_size": 540}
    for other in others:
        queue.remove(other)
    sizes = {queue.stats.kv_used for _ in range(499) if step(queue)}
    assert sizes == {94, 160, 292, 530}
    assert len(one.output_ids) == 499


def test_the_youngest_gives_way_and_comes_back_with_its_answer():
    old, young = run(20, max_tokens=120, content=1), run(20, max_tokens=120, content=2)
    queue = scheduler(kv_tokens=200, prefill_chunk=100)
    queue.add(old)
    queue.add(young)
    given = []
    while queue.busy:
        given += step(queue, token=len(given) % 90)[1]
        assert old in queue._running or len(old.output_ids) == 120
    assert queue.stats.preemptions == 1
    for one in (old, young):
        assert [token.id for whose, token in given if whose is one] == one.output_ids
        assert len(one.output_ids) == 120


def test_a_preempted_run_waits_ahead_of_all_others():
    runs = [run(20, max_tokens=120, content=content) for content in range(4)]
    queue = scheduler(kv_tokens=200, prefill_chunk=100, max_waiting=2, max_batch_size=2)
    for one in runs:
        queue.add(one)
    while not queue.stats.preemptions:
        step(queue)
    assert list(queue._waiting) == runs[1:]
    with pytest.raises(QueueFull):
        queue.add(run(20))
    for ended in range(4):
        while len(runs[ended].output_ids) < 120:
            step(queue)
    assert not queue.busy


def first_token_of(run, queue):
    return next(token for _ in range(400) for whose, token in step(queue)[1] if whose is run)


@pytest.mark.parametrize("known", [0, 32])
def test_what_a_preempted_run_has_read_itself_does_not_count_as_found(known):
    """It is put back while its prompt is being read; `known` tokens of that another run had read before."""
    queue = scheduler(kv_tokens=232, prefill_chunk=2)
    if known:
        queue.add(before := run(known, max_tokens=1, content=2))
        first_token_of(before, queue)
    queue.add(filler := run(160, content=3))  # so that the young one lies in front of the old one, which grows
    queue.add(old := run(2, max_tokens=120, content=1))
    first_token_of(old, queue)
    queue.remove(filler, failed=True)
    queue.add(young := run(160, content=2))
    while not (queue.stats.preemptions or young.output_ids):
        step(queue)
    assert list(queue._waiting) == [young]
    while not young.num_computed_tokens:
        step(queue)
    assert young.num_computed_tokens > known  # it finds rows of its own again
    assert first_token_of(young, queue).cached_tokens == known


@pytest.mark.parametrize(("found", "cached"), [(160, 32), (96, 32), (20, 20), (200, 72)])
def test_what_was_found_counts_whatever_is_left_of_what_a_run_has_read_itself(found, cached):
    """32 tokens were found and 128 read when it was put back; `found` is what is there when its turn comes again."""
    waiting = run(300, content=2)
    waiting.num_cached_tokens, waiting.own = 32, 128
    queue = scheduler(kv_tokens=1000, prefill_chunk=1)
    queue.add(before := run(found, max_tokens=1, content=2))
    first_token_of(before, queue)
    queue.add(waiting)
    queue.schedule()
    assert waiting.num_cached_tokens == cached


def test_a_run_alone_may_take_the_whole_pool_wherever_it_began():
    other, one = run(40, max_tokens=60, content=1), run(40, max_tokens=60, content=2)
    queue = scheduler(kv_tokens=201, prefill_chunk=100)
    queue.add(other)
    queue.add(one)
    step(queue)
    queue.remove(other)
    long = SequenceState.of(replace(one.request, sampling=replace(one.request.sampling, max_tokens=161)), stop=())
    queue.add(long)
    while queue.busy:
        step(queue)
    assert (len(one.output_ids), len(long.output_ids)) == (60, 161)


def test_what_ended_runs_leave_is_given_up_when_it_is_needed():
    queue = scheduler(kv_tokens=100, prefill_chunk=100)
    for content in range(9):
        queue.add(run(40, max_tokens=1, content=content))
        step(queue)
        assert queue.stats.kv_used == 0
    assert queue.stats.kv_cached > 40
    queue.add(whole := run(96, content=10))
    assert (queue.stats.kv_used, queue.stats.kv_cached) == (100, 0)
    queue.remove(whole)


def test_nothing_is_kept_without_the_prefix_cache():
    queue = scheduler(kv_tokens=200, prefill_chunk=100, prefix_cache=False)
    for _ in range(2):
        queue.add(one := run(40, max_tokens=1))
        assert step(queue)[0] == [(one, 0, 40)]
    assert (queue.stats.kv_cached, queue.stats.hits, queue.stats.queries) == (0, 0, 2)


def test_what_a_failed_run_has_read_is_not_kept():
    queue = scheduler(kv_tokens=200, prefill_chunk=20)
    queue.add(one := run(40))
    step(queue)
    assert one.num_computed_tokens == 20
    queue.update(queue.schedule().chunks, {one: DecoderFailed("broken")})
    assert queue.stats.kv_cached == 0


def test_a_conversation_goes_on_in_place():
    queue = scheduler(kv_tokens=400, prefill_chunk=100)
    queue.add(turn := run(40, max_tokens=10))
    while queue.busy:
        step(queue)
    after = replace(turn.request, token_ids=prompt(0, 70).token_ids, positions=prompt(0, 70).positions)
    after.token_ids[40:50] = turn.output_ids
    queue.add(second := SequenceState.of(after, stop=()))
    moves, chunks = queue.schedule()
    assert (moves, chunks) == ([], [(second, 49, 70)])
    assert queue.stats.kv_cached == 0


def test_another_question_about_the_same_picture_starts_from_a_copy():
    queue = scheduler(kv_tokens=400, prefill_chunk=100)
    queue.add(run(60, max_tokens=1))
    step(queue)
    other = prompt(0, 60)
    other.token_ids[37:] = 1
    queue.add(asks := SequenceState.of(other, stop=()))
    moves, chunks = queue.schedule()
    assert chunks == [(asks, 37, 60)]
    assert moves == [KVCopy(0, asks.first_row, 37)]
    assert queue.stats.kv_cached == 60
