"""Admission, chunked prefill, order and memory, without a model."""

from __future__ import annotations

import random

import pytest

from dashinfer_vlm_core.errors import DecoderFailed, QueueFull
from dashinfer_vlm_torch.arena import Arena
from dashinfer_vlm_torch.scheduler import Choice, Run, Scheduler

from .oracle import prompt


def run(length, max_tokens=4, **sampling):
    return Run.of(prompt(0, length, max_tokens=max_tokens, **sampling), stop=(95,))


def scheduler(**options):
    return Scheduler(**({"kv_tokens": 100, "max_batch_size": 4, "max_waiting": 2, "prefill_chunk": 8} | options))


def step(scheduler, token=1):
    """Plan and commit one step in which every run that was read whole gets `token`."""
    chunks = scheduler.plan()
    replies = scheduler.commit(chunks, {chunk.run: Choice(token) for chunk in chunks if chunk.last})
    return [(chunk.run, chunk.start, chunk.stop) for chunk in chunks], replies


def test_a_prompt_is_read_in_chunks_then_decoded_token_by_token():
    one = run(20, max_tokens=3)
    queue = scheduler()
    queue.add(one)
    steps = [step(queue) for _ in range(5)]
    read = [(0, 8), (8, 16), (16, 20), (20, 21), (21, 22)]
    assert [chunks for chunks, _ in steps] == [[(one, start, stop)] for start, stop in read]
    finishes = [[token.finish for _, token in replies] for _, replies in steps]
    assert finishes == [[], [], [None], [None], ["length"]]
    assert not queue.busy


def test_decoding_goes_on_beside_a_long_prompt():
    short, long = run(3), run(40)
    queue = scheduler()
    queue.add(short)
    step(queue)
    queue.add(long)
    chunks, replies = step(queue)
    assert chunks == [(short, 3, 4), (long, 0, 8)]
    assert [one for one, _ in replies] == [short]


def test_prompts_share_the_budget_of_a_step_in_order():
    runs = [run(5), run(6), run(7)]
    queue = scheduler()
    for one in runs:
        queue.add(one)
    assert step(queue)[0] == [(runs[0], 0, 5), (runs[1], 0, 3)]
    assert step(queue)[0] == [(runs[0], 5, 6), (runs[1], 3, 6), (runs[2], 0, 5)]


def test_a_large_request_is_not_overtaken():
    """The third would fit, but the second came first."""
    first, large, small = run(60), run(70), run(5)
    queue = scheduler()
    for one in (first, large, small):
        queue.add(one)
    assert [chunk.run for chunk in queue.plan()] == [first]
    assert queue.stats._asdict() == {"running": 1, "waiting": 2, "kv_used": 64, "kv_size": 100}
    queue.remove(first)
    assert [one for one, _, _ in step(queue)[0]] == [large]
    assert queue.stats.running == 2


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
    chunks = queue.plan()
    queue.remove(gone)
    assert queue.stats.kv_used == stays.footprint
    replies = queue.commit(chunks, {gone: Choice(1), stays: Choice(1)})
    assert [one for one, _ in replies] == [stays]
    assert gone.answer == []


def test_a_failed_run_frees_what_it_held():
    one = run(4)
    queue = scheduler()
    queue.add(one)
    ((_, reply),) = queue.commit(queue.plan(), {one: DecoderFailed("broken")})
    assert isinstance(reply, DecoderFailed)
    assert queue.stats._asdict() == {"running": 0, "waiting": 0, "kv_used": 0, "kv_size": 100}


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
    assert first[ends["own"]].finish == "stop"
    assert (first[ends["ignored"]].finish, second[ends["ignored"]].finish) == (None, "length")
    assert (first[ends["asked"]].finish, second[ends["asked"]].finish) == (None, "stop")


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


def test_arena_ranges_never_overlap_and_freed_space_is_joined():
    chance, arena, taken = random.Random(0), Arena(1000), {}
    for _ in range(3000):
        if taken and chance.random() < 0.5:
            start = chance.choice(list(taken))
            arena.free(start)
            del taken[start]
        else:
            length = chance.randint(1, 200)
            start = arena.allocate(length)
            if start is not None:
                assert all(start + length <= other or other + size <= start for other, size in taken.items())
                assert 0 <= start <= 1000 - length
                taken[start] = length
        assert arena.used == sum(taken.values())
    for start in taken:
        arena.free(start)
    assert arena.allocate(1000) == 0


def test_arena_takes_the_tightest_gap():
    arena = Arena(100)
    large, _, small, _ = (arena.allocate(length) for length in (30, 10, 20, 40))
    arena.free(large)
    arena.free(small)
    assert arena.allocate(15) == small
    assert arena.allocate(25) == large
    assert arena.allocate(25) is None
