"""`bench`: the requests and the statistics."""

from __future__ import annotations

import json

import pytest

from dashinfer_vlm_cli.bench import Workload, summary
from dashinfer_vlm_core.errors import QueueFull

pytestmark = pytest.mark.slow


def workload(**changes):
    return Workload(**{"images": 2, "size": (56, 84), "words": 5, "tokens": 8, "seed": 0, **changes})


def test_chats_are_unique_and_reproducible_by_seed():
    first, second = workload().request(0), workload().request(1)
    urls = [part["image_url"]["url"] for chat in (first, second) for part in chat["messages"][0]["content"][:2]]
    assert len(set(urls)) == 4
    assert first == workload().request(0)
    assert first != workload(seed=1).request(0)


def test_chat_has_requested_shape():
    chat = workload(images=0, words=7, tokens=9).request(3)
    (part,) = chat["messages"][0]["content"]
    assert len(part["text"].split()) == 8
    assert (chat["max_tokens"], chat["ignore_eos"]) == (9, True)


def test_summary_uses_nearest_rank_percentiles():
    assert summary([]) == {}
    assert summary([0.005]) == {"mean": 5, "p50": 5, "p90": 5, "p99": 5}
    statistics = summary([number / 1000 for number in range(100, 0, -1)])
    assert (statistics["p50"], statistics["p90"], statistics["p99"]) == (50, 90, 99)


def test_json_contains_rates_and_times(run, server_url):
    url = server_url("one two three four.", delay=0.005)
    words = ("--json", "-n", 6, "--concurrency", 2, "--size", "56x56", "--warmup", 1)
    result = run("bench", "--api-base", url, *words)
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert (report["completed"], report["failed"], report["errors"]) == (6, 0, [])
    assert report["requests_per_second"] == pytest.approx(6 / report["seconds"])
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "latency_ms"):
        assert 0 < report[name]["p50"] <= report[name]["p90"] <= report[name]["p99"]
    assert report["ttft_ms"]["mean"] < report["latency_ms"]["mean"]


def test_table_for_text_only_chats_at_a_rate(run, server_url):
    result = run("bench", "--api-base", server_url("Yes. No."), "-n", 4, "--images", 0, "--rate", 200)
    assert "requests per second" in result.stdout
    assert all(name in result.stdout for name in ("TTFT (ms)", "TPOT (ms)", "ITL (ms)", "P99"))


def test_failures_are_counted_and_reported(run, server_url):
    args = ("-n", 3, "--warmup", 0, "--concurrency", 1, "--json")
    result = run("bench", "--api-base", server_url("Yes.", QueueFull("Busy.")), *args)
    report = json.loads(result.stdout)
    assert (report["completed"], report["failed"], report["errors"]) == (1, 2, ["Busy."])
    assert result.exit_code == 1


@pytest.mark.parametrize("size", ["448", "x", "0x5", "9000x9000"])
def test_invalid_size_is_rejected(run, size):
    result = run("bench", "--size", size)
    assert result.exit_code == 2
    assert "--size" in result.output
