"""Admission, chunked prefill, order, preemption and memory, without a model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dashinfer_vlm_core.decoders import Pooled, Token
from dashinfer_vlm_core.errors import DecoderFailed, QueueFull
from dashinfer_vlm_torch.kv_cache_manager import KVCopy
from dashinfer_vlm_torch.prefill_budget import PrefillBudget
from dashinfer_vlm_torch.scheduler import Scheduler
from dashinfer_vlm_torch.sequence import INITIAL_OUTPUT_ROWS, ScheduledChunk, SequenceState

from .oracle import prompt


def sequence(length, max_tokens=4, *, content=0, **sampling):
    return SequenceState(prompt(content, length, max_tokens=max_tokens, **sampling), stop=(95,))


def scheduler(**options):
    return Scheduler(**({"kv_tokens": 100, "max_batch_size": 4, "max_waiting": 2, "prefill_chunk": 8} | options))


def step(scheduler, token=1):
    """Schedule and update one step in which every fully computed sequence gets `token`."""
    chunks = scheduler.schedule().chunks
    outputs = scheduler.update(chunks, {chunk.sequence: (Token(id=token),) for chunk in chunks if chunk.needs_logits})
    return [(chunk.sequence, chunk.start, chunk.stop) for chunk in chunks], outputs


def load(scheduler):
    stats = scheduler.stats
    return {"running": stats.running, "waiting": stats.waiting, "kv_used": stats.kv_used, "kv_size": stats.kv_size}


def test_prompt_is_prefilled_in_chunks_then_decoded():
    one = sequence(20, max_tokens=3)
    queue = scheduler()
    queue.add(one)
    steps = [step(queue) for _ in range(5)]
    read = [(0, 8), (8, 16), (16, 20), (20, 21), (21, 22)]
    assert [chunks for chunks, _ in steps] == [[(one, start, stop)] for start, stop in read]
    finishes = [[token.finish_reason for _, token in outputs] for _, outputs in steps]
    assert finishes == [[], [], [None], [None], ["length"]]
    assert not queue.busy


def test_decoding_continues_during_long_prefill():
    short, long = sequence(3), sequence(40)
    queue = scheduler()
    queue.add(short)
    step(queue)
    queue.add(long)
    chunks, outputs = step(queue)
    assert chunks == [(short, 3, 4), (long, 0, 4)]  # half a chunk, so that decoding is not delayed for long
    assert [one for one, _ in outputs] == [short]


def test_prefill_is_limited_by_recent_seconds():
    running, long = sequence(4, max_tokens=9), sequence(1200, content=1)
    queue = scheduler(kv_tokens=2000, prefill_chunk=512, prefix_cache=False)
    queue.add(running)
    step(queue)
    queue.add(long)

    def scheduled():
        return sum(chunk.stop - chunk.start for chunk in queue.schedule().chunks if chunk.sequence is long)

    assert scheduled() == 256  # half a chunk, since nothing was measured
    for seconds in (2.56, 0.256, 0.256, 0.256, 7.0):  # a pause of the process does not change the median
        queue.record_seconds([ScheduledChunk(long, 0, 256)], seconds)
    assert scheduled() == 100
    for _ in range(5):
        queue.record_seconds([ScheduledChunk(long, 0, 256)], 25.6)
    assert scheduled() == 80
    queue.remove(running)
    assert scheduled() == 80
    for seconds, expected in ((2.56, 200), (0.256, 512)):
        for _ in range(5):
            queue.record_seconds([ScheduledChunk(long, 0, 256)], seconds)
        assert scheduled() == expected


def test_short_steps_do_not_change_prefill_budget():
    budget = PrefillBudget(512)
    for _ in range(5):
        budget.record(8, 1.0)
    assert budget.tokens(has_decodes=True) == 256


def test_prompts_share_step_budget_in_order():
    runs = [sequence(5), sequence(6), sequence(7)]
    queue = scheduler()
    for one in runs:
        queue.add(one)
    assert step(queue)[0] == [(runs[0], 0, 5), (runs[1], 0, 3)]
    assert step(queue)[0] == [(runs[0], 5, 6), (runs[1], 3, 6), (runs[2], 0, 1)]


def test_large_request_is_not_overtaken():
    """The third would fit, but the second came first."""
    first, large, small = sequence(60), sequence(70), sequence(5)
    queue = scheduler()
    for one in (first, large, small):
        queue.add(one)
    assert [chunk.sequence for chunk in queue.schedule().chunks] == [first]
    assert load(queue) == {"running": 1, "waiting": 2, "kv_used": 64, "kv_size": 100}
    queue.remove(first)
    assert [one for one, _, _ in step(queue)[0]] == [large, small]


def test_full_queue_rejects_and_frees_slot():
    queue = scheduler(max_batch_size=1, max_waiting=1)
    running, waiting = sequence(5), sequence(5)
    queue.add(running)
    queue.add(waiting)
    with pytest.raises(QueueFull) as refusal:
        queue.add(sequence(5))
    assert refusal.value.retryable
    queue.remove(waiting)
    queue.add(sequence(5))


def test_free_slot_is_used_without_queue():
    queue = scheduler(max_batch_size=1, max_waiting=0)
    queue.add(sequence(5))
    with pytest.raises(QueueFull):
        queue.add(sequence(5))


def test_removed_sequence_is_skipped_by_current_step():
    gone, stays = sequence(4), sequence(4)
    queue = scheduler()
    queue.add(gone)
    queue.add(stays)
    chunks = queue.schedule().chunks
    queue.remove(gone)
    assert queue.stats.kv_used == stays.max_len
    outputs = queue.update(chunks, {gone: (Token(id=1),), stays: (Token(id=1),)})
    assert [one for one, _ in outputs] == [stays]
    assert gone.output_ids == []


def test_failed_sequence_frees_its_memory():
    one = sequence(4)
    queue = scheduler()
    queue.add(one)
    ((_, reply),) = queue.update(queue.schedule().chunks, {one: DecoderFailed("broken")})
    assert isinstance(reply, DecoderFailed)
    assert load(queue) == {"running": 0, "waiting": 0, "kv_used": 0, "kv_size": 100}


def test_finish_reasons_follow_sampling_params():
    ends = {
        "own": sequence(2, 9),
        "ignored": sequence(2, 2, ignore_eos=True),
        "asked": sequence(2, 9, stop_token_ids=(7,), ignore_eos=True),
    }
    queue = scheduler()
    for one in ends.values():
        queue.add(one)
    first = dict(step(queue, token=95)[1])
    second = dict(step(queue, token=7)[1])
    assert first[ends["own"]].finish_reason == "stop"
    assert (first[ends["ignored"]].finish_reason, second[ends["ignored"]].finish_reason) == (None, "length")
    assert (first[ends["asked"]].finish_reason, second[ends["asked"]].finish_reason) == (None, "stop")


def test_seeds_of_any_size_are_accepted():
    assert sequence(1, seed=-1).seed == 2**64 - 1
    assert sequence(1, seed=2**64 + 5).seed == 5
    assert sequence(1).seed != sequence(1).seed


def test_clear_returns_all_sequences():
    queue = scheduler(max_batch_size=2)
    runs = [sequence(5) for _ in range(4)]
    for one in runs:
        queue.add(one)
    assert queue.clear() == runs
    assert not queue.busy
    assert queue.stats.kv_used == 0


# Prefill order


def test_short_prompt_does_not_wait_for_long_one():
    """The long one continues with at least half of the budget."""
    long, short = sequence(80, content=1), sequence(6, content=2)
    queue = scheduler(kv_tokens=200)
    queue.add(long)
    step(queue)
    queue.add(short)
    assert step(queue)[0] == [(long, 8, 12), (short, 0, 4)]
    chunks, outputs = step(queue)
    assert chunks == [(long, 12, 18), (short, 4, 6)]
    assert [one for one, _ in outputs] == [short]


def test_long_prompt_is_not_starved_by_short_ones():
    long = sequence(80, content=1)
    queue = scheduler(kv_tokens=2000, max_batch_size=30)
    queue.add(long)
    for content in range(2, 22):
        queue.add(sequence(8, max_tokens=1, content=content))
        step(queue)
    assert long.output_ids


def test_equal_concurrent_prompts_are_computed_once():
    first, second = sequence(40), sequence(40)
    queue = scheduler(prefill_chunk=30, kv_tokens=200)
    queue.add(first)
    queue.add(second)
    read = [step(queue)[0] for _ in range(3)]
    assert read == [[(first, 0, 30)], [(first, 30, 40)], [(first, 40, 41), (second, 39, 40)]]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 39)
    assert queue.stats.cached_tokens == 39


def test_no_waiting_for_equal_prompt_without_prefix_cache():
    queue = scheduler(kv_tokens=1000, prefill_chunk=512, prefix_cache=False)
    for _ in range(4):
        queue.add(sequence(32))
    assert len(queue.schedule().chunks) == 4


def test_mostly_different_prompt_does_not_wait():
    """The prompts share their first 16 tokens."""
    one, other = sequence(60), sequence(60)
    other.request.token_ids[16:] = 1
    other = SequenceState(other.request, stop=())
    queue = scheduler(prefill_chunk=120, kv_tokens=200)
    queue.add(one)
    queue.add(other)
    assert [chunk[:3] for chunk in queue.schedule().chunks] == [(one, 0, 60), (other, 0, 60)]


def test_follower_continues_when_leader_is_removed():
    first, second = sequence(60), sequence(60)
    queue = scheduler(prefill_chunk=30, kv_tokens=200)
    queue.add(first)
    queue.add(second)
    step(queue)
    queue.remove(first)
    assert step(queue)[0] == [(second, 30, 60)]


# Memory


def test_sequence_is_admitted_with_initial_rows_and_grows():
    one, others = sequence(30, max_tokens=500), [sequence(30, max_tokens=500, content=content) for content in (1, 2)]
    queue = scheduler(kv_tokens=540, prefill_chunk=100)
    queue.add(one)
    assert queue.stats.kv_used == 30 + INITIAL_OUTPUT_ROWS
    for other in others:
        queue.add(other)
    assert load(queue) == {"running": 3, "waiting": 0, "kv_used": 3 * (30 + INITIAL_OUTPUT_ROWS), "kv_size": 540}
    for other in others:
        queue.remove(other)
    sizes = {queue.stats.kv_used for _ in range(499) if step(queue)}
    assert sizes == {94, 160, 292, 530}
    assert len(one.output_ids) == 499


def test_youngest_is_preempted_and_resumes_with_its_output():
    old, young = sequence(20, max_tokens=120, content=1), sequence(20, max_tokens=120, content=2)
    queue = scheduler(kv_tokens=200, prefill_chunk=100)
    queue.add(old)
    queue.add(young)
    given = []
    while queue.busy:
        given += step(queue, token=len(given) % 90)[1]
        assert old in queue._running or len(old.output_ids) == 120
    assert queue.stats.preemptions == 1
    for one in (old, young):
        assert [token.id for owner, token in given if owner is one] == one.output_ids
        assert len(one.output_ids) == 120


def test_preempted_sequence_is_first_in_queue():
    runs = [sequence(20, max_tokens=120, content=content) for content in range(4)]
    queue = scheduler(kv_tokens=200, prefill_chunk=100, max_waiting=2, max_batch_size=2)
    for one in runs:
        queue.add(one)
    while not queue.stats.preemptions:
        step(queue)
    assert list(queue._waiting) == runs[1:]
    with pytest.raises(QueueFull):
        queue.add(sequence(20))
    for ended in range(4):
        while len(runs[ended].output_ids) < 120:
            step(queue)
    assert not queue.busy


def first_token_of(sequence, queue):
    return next(token for _ in range(400) for owner, token in step(queue)[1] if owner is sequence)


@pytest.mark.parametrize("known", [0, 32])
def test_own_rows_of_preempted_sequence_are_not_cached_tokens(known):
    """It is preempted during prefill; another sequence had computed `known` of its tokens before."""
    queue = scheduler(kv_tokens=232, prefill_chunk=2)
    if known:
        queue.add(before := sequence(known, max_tokens=1, content=2))
        first_token_of(before, queue)
    queue.add(
        filler := sequence(160, content=3)
    )  # so that the young one is placed in front of the old one, which grows
    queue.add(old := sequence(2, max_tokens=120, content=1))
    first_token_of(old, queue)
    queue.remove(filler, failed=True)
    queue.add(young := sequence(160, content=2))
    while not (queue.stats.preemptions or young.output_ids):
        step(queue)
    assert list(queue._waiting) == [young]
    while not young.num_computed_tokens:
        step(queue)
    assert young.num_computed_tokens > known  # it reuses its own rows
    assert first_token_of(young, queue).cached_tokens == known


@pytest.mark.parametrize(("found", "cached"), [(160, 32), (96, 32), (20, 20), (200, 72)])
def test_cached_tokens_after_preemption(found, cached):
    """32 tokens were cached and 128 computed at preemption; `found` tokens are cached when it is scheduled again."""
    waiting = sequence(300, content=2)
    waiting.num_cached_tokens, waiting.num_preempted_tokens = 32, 128
    queue = scheduler(kv_tokens=1000, prefill_chunk=1)
    queue.add(before := sequence(found, max_tokens=1, content=2))
    first_token_of(before, queue)
    queue.add(waiting)
    queue.schedule()
    assert waiting.num_cached_tokens == cached


def test_single_sequence_may_use_whole_pool():
    other, one = sequence(40, max_tokens=60, content=1), sequence(40, max_tokens=60, content=2)
    queue = scheduler(kv_tokens=201, prefill_chunk=100)
    queue.add(other)
    queue.add(one)
    step(queue)
    queue.remove(other)
    long = SequenceState(replace(one.request, sampling=replace(one.request.sampling, max_tokens=161)), stop=())
    queue.add(long)
    while queue.busy:
        step(queue)
    assert (len(one.output_ids), len(long.output_ids)) == (60, 161)


def test_cached_rows_are_evicted_on_demand():
    queue = scheduler(kv_tokens=100, prefill_chunk=100)
    for content in range(9):
        queue.add(sequence(40, max_tokens=1, content=content))
        step(queue)
        assert queue.stats.kv_used == 0
    assert queue.stats.kv_cached > 40
    queue.add(whole := sequence(96, content=10))
    assert (queue.stats.kv_used, queue.stats.kv_cached) == (100, 0)
    queue.remove(whole)


def test_nothing_is_cached_without_prefix_cache():
    queue = scheduler(kv_tokens=200, prefill_chunk=100, prefix_cache=False)
    for _ in range(2):
        queue.add(one := sequence(40, max_tokens=1))
        assert step(queue)[0] == [(one, 0, 40)]
    assert (queue.stats.kv_cached, queue.stats.hits, queue.stats.queries) == (0, 0, 2)


def test_rows_of_failed_sequence_are_not_cached():
    queue = scheduler(kv_tokens=200, prefill_chunk=20)
    queue.add(one := sequence(40))
    step(queue)
    assert one.num_computed_tokens == 20
    queue.update(queue.schedule().chunks, {one: DecoderFailed("broken")})
    assert queue.stats.kv_cached == 0


def test_conversation_continues_in_place():
    queue = scheduler(kv_tokens=400, prefill_chunk=100)
    queue.add(turn := sequence(40, max_tokens=10))
    while queue.busy:
        step(queue)
    after = replace(turn.request, token_ids=prompt(0, 70).token_ids, positions=prompt(0, 70).positions)
    after.token_ids[40:50] = turn.output_ids
    queue.add(second := SequenceState(after, stop=()))
    moves, chunks = queue.schedule()
    assert (moves, [chunk[:3] for chunk in chunks]) == ([], [(second, 49, 70)])
    assert queue.stats.kv_cached == 0


def test_other_prompt_on_same_image_starts_from_copy():
    queue = scheduler(kv_tokens=400, prefill_chunk=100)
    queue.add(sequence(60, max_tokens=1))
    step(queue)
    other = prompt(0, 60)
    other.token_ids[37:] = 1
    queue.add(asks := SequenceState(other, stop=()))
    moves, chunks = queue.schedule()
    assert [chunk[:3] for chunk in chunks] == [(asks, 37, 60)]
    assert moves == [KVCopy(0, asks.first_row, 37)]
    assert queue.stats.kv_cached == 60


def test_rows_of_all_tokens_are_collected_over_chunks():
    one = SequenceState(replace(prompt(0, 20), pooling=True), stop=(), pools_tokens=True)
    queue = scheduler(prefix_cache=False)
    queue.add(one)

    def pool():
        (chunk,) = queue.schedule().chunks
        rows = np.arange(chunk.start, chunk.stop, dtype=np.float32)[:, None]
        return queue.update([chunk], {one: Pooled(vector=rows)})

    assert [pool(), pool()] == [[], []]
    ((_, pooled),) = pool()
    assert pooled.vector[:, 0].tolist() == list(range(20))
    assert not queue.busy
