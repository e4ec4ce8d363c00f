"""The comparison of engines, with two of ours: the other ones are too large for a test."""

from __future__ import annotations

import importlib.util
import json

import pytest

from benchmarks import compare
from benchmarks.report import LIMIT, Row

pytestmark = pytest.mark.interop


@pytest.mark.timeout(300)
def test_engine_comparison_includes_limits(tmp_path):
    names = ["--engines", "", "--engine", "chunks=--prefill-chunk 64", "--engine", "in-process"]
    work = ["--workloads", "fresh-1,chats-3", "--quick", "--rounds", "1", "--settle", "0"]
    results = compare.main(["--model", "demo", *names, *work, "--out", str(tmp_path)])
    rate = Row("fresh-1", "new images, 1 user", "TTFT, s")
    assert results.figures[rate].keys() == {"in-process", "chunks", LIMIT}
    raw = json.loads((tmp_path / "compare.json").read_text())
    assert len(raw["runs"]) == 2 * 2 - 1  # chats are not run in process
    assert not [answer["fault"] for run in raw["runs"] for answer in run["answers"] if answer["fault"]]
    assert (
        "| chats-3: chats of three turns, 3 users | turns/s (more is better) |" in (tmp_path / "compare.md").read_text()
    )
    if importlib.util.find_spec("matplotlib"):
        assert "<svg" in (tmp_path / "ratios.svg").read_text()
        assert "<svg" in (tmp_path / "users.svg").read_text()
