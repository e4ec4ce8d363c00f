"""`bench`: what is asked, and what is counted."""

from __future__ import annotations

import json

import pytest

from dashinfer_vlm_cli.bench import Shape, summary
from dashinfer_vlm_core.errors import QueueFull


def shape(**changes):
    return Shape(**{"pictures": 2, "size": (56, 84), "words": 5, "tokens": 8, "seed": 0, **changes})


def test_no_two_chats_are_alike_and_a_seed_makes_the_same_again():
    first, second = shape().request(0), shape().request(1)
    urls = [part["image_url"]["url"] for chat in (first, second) for part in chat["messages"][0]["content"][:2]]
    assert len(set(urls)) == 4
    assert first == shape().request(0)
    assert first != shape(seed=1).request(0)


def test_a_chat_has_the_shape_that_was_asked_for():
    chat = shape(pictures=0, words=7, tokens=9).request(3)
    (part,) = chat["messages"][0]["content"]
    assert len(part["text"].split()) == 8
    assert (chat["max_tokens"], chat["ignore_eos"]) == (9, True)


def test_percentiles_are_those_of_the_nearest_rank():
    assert summary([]) == {}
    assert summary([0.005]) == {"mean": 5, "p50": 5, "p90": 5, "p99": 5}
    found = summary([number / 1000 for number in range(100, 0, -1)])
    assert (found["p50"], found["p90"], found["p99"]) == (50, 90, 99)


def test_json_holds_rates_and_times(run, address):
    url = address("one two three four.", delay=0.005)
    words = ("--json", "-n", 6, "--concurrency", 2, "--size", "56x56", "--warmup", 1)
    result = run("bench", "--api-base", url, *words)
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["completed"], found["failed"], found["errors"]) == (6, 0, [])
    assert found["requests_per_second"] == pytest.approx(6 / found["seconds"])
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "latency_ms"):
        assert 0 < found[name]["p50"] <= found[name]["p90"] <= found[name]["p99"]
    assert found["ttft_ms"]["mean"] < found["latency_ms"]["mean"]


def test_a_table_for_people_with_chats_of_text_at_a_rate(run, address):
    result = run("bench", "--api-base", address("Yes. No."), "-n", 4, "--pictures", 0, "--rate", 200)
    assert "requests per second" in result.stdout
    assert all(name in result.stdout for name in ("TTFT (ms)", "TPOT (ms)", "ITL (ms)", "P99"))


def test_failures_are_counted_and_named(run, address):
    result = run("bench", "--api-base", address("Yes.", QueueFull("Busy.")), "-n", 3, "--warmup", 0, "--concurrency", 1,
                 "--json")  # fmt: skip
    found = json.loads(result.stdout)
    assert (found["completed"], found["failed"], found["errors"]) == (1, 2, ["Busy."])
    assert result.exit_code == 1


@pytest.mark.parametrize("size", ["448", "x", "0x5", "9000x9000"])
def test_a_size_that_is_none_is_refused(run, size):
    refused = run("bench", "--size", size)
    assert refused.exit_code == 2
    assert "--size" in refused.output
