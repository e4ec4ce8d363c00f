"""Steps that are launched before the tokens of the last one are read give the same tokens."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
import torch

from dashinfer_vlm_core.decoders import Token
from dashinfer_vlm_core.errors import DecoderFailed
from dashinfer_vlm_torch.proposer import Draft
from dashinfer_vlm_torch.runner import LaunchedStep, ModelRunner
from dashinfer_vlm_torch.sampler import LaunchedArgmax
from dashinfer_vlm_torch.sequence import ScheduledChunk, SequenceState
from tests.decoder_pause import DecoderPause
from tests.waiting import until

from .oracle import collect, decoding, ids, prompt, text, visual
from .test_torch_scheduler import scheduler, sequence, step


class Ahead:
    """Counts the steps of a decoder that are launched ahead, and can make some reads fail.

    Args:
        runner: the decoder's runner.
        failing: numbers of the reads that fail, as a GPU reports an error when a result is read.
    """

    def __init__(self, runner: ModelRunner, failing=()):
        self.count = self.launches = self.reads = 0
        self._failing = failing
        self._launch, self._read = runner.launch, runner.read
        runner.launch, runner.read = self.launch, self.read

    def launch(self, chunks, previous=None):
        self.count += previous is not None
        self.launches += 1
        return self._launch(chunks, previous)

    def read(self, launched):
        self.reads += 1
        if self.reads in self._failing:
            raise RuntimeError("a fault of this test")
        return self._read(launched)


def complete(oracle, requests, failing=(), **options):
    """Return the completions of requests, and the number of steps that were launched ahead.

    Sequences are preempted if `options` limit the KV cache, and only then.
    """

    async def run():
        async with decoding(oracle.decoder(**options)) as decoder:
            ahead = Ahead(decoder._worker._runner, failing)
            found = await asyncio.gather(*(collect(decoder, request) for request in requests))
            stats = decoder.snapshot()
            assert (stats.running, stats.kv_used) == (0, 0)
            assert (stats.preemptions > 0) == ("kv_cache_mib" in options)
            return found, ahead.count

    return asyncio.run(run())


def mixed(width):
    """Return requests with each kind of sampling that permits steps ahead, and some that do not."""
    drawn = {"temperature": 0.9, "max_tokens": 20}
    return [
        prompt(1, 20),
        prompt(2, 70, ignore_eos=True, max_tokens=80),  # more than the rows that are reserved at first
        visual(4, (2, 3, 4), 8, width=width, content=4),
        prompt(3, 5, seed=3, top_p=0.9, top_k=20, **drawn),
        prompt(4, 6, seed=4, min_tokens=12, stop_token_ids=tuple(range(40)), **drawn),
        prompt(5, 7, max_tokens=1),
        prompt(6, 8, seed=5, logit_bias={7: 3.0}, **drawn),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("speculative_method", ["none", "ngram"])
@pytest.mark.parametrize("options", [{}, {"max_batch_size": 2, "prefill_chunk": 16}])
def test_tokens_are_those_of_steps_in_order(oracle, options, speculative_method):
    requests, options = mixed(oracle.width), {"speculative_method": speculative_method} | options
    expected, none = complete(oracle, requests, **options)
    found, count = complete(oracle, requests, schedules_ahead=True, **options)
    assert found == expected
    assert none == 0
    assert count > 20 or speculative_method == "ngram"  # how often that drafts depends on measured times


@pytest.mark.slow
def test_preempted_sequences_continue(oracle):
    """2048 tokens fit; each request grows to 620."""
    requests = [prompt(seed, 20, max_tokens=600, ignore_eos=True) for seed in range(4)]
    options = {"kv_cache_mib": 1, "speculative_method": "none"}
    expected, _ = complete(oracle, requests, **options)
    found, count = complete(oracle, requests, schedules_ahead=True, **options)
    assert found == expected
    assert count > 600


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        {"logprobs": 2},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.5},
        {"no_repeat_ngram_size": 2},
    ],
)
def test_steps_that_need_earlier_tokens_wait_for_them(oracle, sampling):
    requests = [prompt(1, 20, **sampling), prompt(2, 30)]
    expected, _ = complete(oracle, requests[:1])
    found, count = complete(oracle, requests[:1], schedules_ahead=True)
    assert (found, count) == (expected, 0)
    expected, found = (complete(oracle, requests, schedules_ahead=ahead)[0] for ahead in (False, True))
    assert list(map(ids, found)) == list(map(ids, expected))  # log-probabilities differ by the rounding of a batch


@pytest.mark.parametrize("failing", [(4,), (4, 5, 6)])
def test_failed_step_discards_the_step_ahead(oracle, failing):
    """The fifth and sixth read are those of two chunks that are computed alone."""
    requests = [prompt(seed, 5, max_tokens=12, ignore_eos=True) for seed in range(2)]
    expected, _ = complete(oracle, requests)

    async def run():
        async with decoding(oracle.decoder(schedules_ahead=True, speculative_method="none")) as decoder:
            ahead = Ahead(decoder._worker._runner, failing)
            pause = DecoderPause(decoder, steps=0)
            tasks = [asyncio.create_task(collect(decoder, one)) for one in requests]
            await asyncio.to_thread(
                until, lambda: decoder.snapshot().running + decoder.snapshot().waiting == len(tasks)
            )
            pause.release()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert ahead.launches == ahead.reads + 1
            assert decoder.snapshot().kv_used == 0
            return found

    found = asyncio.run(run())
    if len(failing) == 1:
        assert found == expected
    else:
        assert all(isinstance(end, DecoderFailed) for end in found)


def test_cancellation_beside_a_step_ahead(oracle):
    """Rows of a canceled sequence are used again, although a step that writes to them has been launched."""

    async def run(*, ahead):
        decoder = oracle.decoder(schedules_ahead=ahead, max_batch_size=2, speculative_method="none")
        async with decoding(decoder):
            pause = DecoderPause(decoder, steps=6)
            stays = asyncio.create_task(collect(decoder, prompt(1, 20, max_tokens=60, ignore_eos=True)))
            joins = asyncio.create_task(collect(decoder, prompt(1, 40, max_tokens=60, ignore_eos=True)))
            async with aclosing(decoder.decode(prompt(2, 30, max_tokens=500, ignore_eos=True))) as tokens:
                async for _ in tokens:
                    break
            pause.release()
            return [ids(await task) for task in (stays, joins)]

    assert asyncio.run(run(ahead=True)) == asyncio.run(run(ahead=False))


def running(*lengths, **options):
    """Return a scheduler whose sequences have one token each, and the chunks of their next step."""
    queue = scheduler(**options)
    sequences = [sequence(length, max_tokens=4, content=length) for length in lengths]
    for one in sequences:
        queue.add(one)
    step(queue)
    return queue, sequences, queue.schedule().chunks


def test_step_ahead_has_the_next_token_of_each_sequence():
    queue, (one, other), chunks = running(3, 4)
    assert queue.schedule_ahead(chunks) == [ScheduledChunk(one, 4, 5), ScheduledChunk(other, 5, 6)]
    queue.remove(other)
    assert queue.schedule_ahead(chunks) == [ScheduledChunk(one, 4, 5)]


def test_outcome_of_a_sequence_that_ended_is_skipped():
    queue, (one, other), chunks = running(3, 4)
    ahead = queue.schedule_ahead(chunks)
    outputs = queue.update(chunks, {one: (Token(id=95),), other: (Token(id=1),)})
    assert [token.finish_reason for _, token in outputs] == ["stop", None]
    outputs = queue.update(ahead, {one: (Token(id=2),), other: (Token(id=3),)})
    assert [(state, token.id) for state, token in outputs] == [(other, 3)]
    assert other.output_ids == [1, 1, 3]


def test_sequence_that_reaches_its_length_has_no_step_ahead():
    queue, (one,), chunks = running(3)
    for _ in range(2):
        ahead = queue.schedule_ahead(chunks)
        queue.update(chunks, {one: (Token(id=1),)})
        chunks = ahead
    assert len(one.output_ids) == 3
    assert queue.schedule_ahead(chunks) == []


def test_step_ahead_waits_for_new_sequences():
    queue, _, chunks = running(3)
    queue.add(sequence(5))
    assert queue.schedule_ahead(chunks) == []


def test_step_ahead_waits_for_rows():
    queue = scheduler(kv_tokens=200)
    grows = sequence(3, max_tokens=100)
    queue.add(grows)
    while grows.length < grows.allocation.rows:
        step(queue)
    assert queue.schedule_ahead(queue.schedule().chunks) == []


def test_repetitions_are_drafted():
    """The next step waits for the tokens of one that could be followed by a draft."""
    queue = scheduler(kv_tokens=400, prefill_chunk=100, speculative=True)
    one = SequenceState(text(*range(20, 50), max_tokens=40), stop=(95,))
    queue.add(one)
    chunks, ahead = queue.schedule().chunks, [ScheduledChunk(one, 0, 0)]
    while not chunks[0].draft.tokens:
        previous, ahead = ahead, queue.schedule_ahead(chunks)
        queue.update(chunks, {one: (Token(id=len(one.output_ids) % 4 + 1),)})
        chunks = ahead or queue.schedule().chunks
    assert previous
    assert one.output_ids == [1, 2, 3, 4, 1, 2, 3]
    assert chunks[0].draft.tokens[0] == 4


def test_step_with_other_rows_of_logits_has_no_step_ahead():
    """Also if the sequence that has none, or several, was canceled since."""
    queue, (one, other), chunks = running(3, 4)
    drafted = [chunks[0]._replace(draft=Draft((7, 8))), chunks[1]]
    queue.remove(one)
    assert queue.schedule_ahead(drafted) == []
    long = sequence(20)
    queue.add(long)
    chunks = queue.schedule().chunks
    queue.remove(long)
    assert [chunk.needs_logits for chunk in chunks] == [True, False]
    assert queue.schedule_ahead(chunks) == []
    assert queue.schedule_ahead(chunks[:1]) == [ScheduledChunk(other, 5, 6)]


def test_token_ids_are_those_of_a_sequence_with_one_row():
    states = [sequence(length) for length in (3, 4, 5, 6)]
    chunks = [ScheduledChunk(state, 0, 3) for state in states]
    step = LaunchedStep(chunks, [0, 3, 1, 1], LaunchedArgmax(torch.arange(10, 15), None))
    assert step.token_ids(states[2:]).tolist() == [13, 14]
    assert step.token_ids(states[3:]).tolist() == [14]


def test_step_that_cannot_be_launched_ahead_is_computed_later(oracle, caplog):
    requests = [prompt(seed, 5, max_tokens=12, ignore_eos=True) for seed in range(2)]
    expected, _ = complete(oracle, requests)

    async def run():
        async with decoding(oracle.decoder(schedules_ahead=True, speculative_method="none")) as decoder:
            runner = decoder._worker._runner
            launch, failed = runner.launch, []

            def fail(chunks, previous=None):
                if previous is not None:
                    failed.append(chunks)
                    raise RuntimeError("out of memory")
                return launch(chunks)

            runner.launch = fail
            found = await asyncio.gather(*(collect(decoder, request) for request in requests))
            return found, len(failed)

    assert asyncio.run(run()) == (expected, 1)
    assert "could not be launched ahead" in caplog.text


def test_prompts_are_not_continued_ahead():
    queue = scheduler()
    queue.add(sequence(20))
    chunks = queue.schedule().chunks
    assert not chunks[0].needs_logits
    assert queue.schedule_ahead(chunks) == []
