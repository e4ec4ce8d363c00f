"""`benchmarks.scaling` measures each phase, and computes efficiencies; nothing here measures speed."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.client import EngineTarget
from benchmarks.scaling import Sizes, core_counts, measure, table
from dashinfer_vlm_core.testing import scripted_engine


@pytest.mark.parametrize(
    ("cores", "counts"),
    [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16]), (48, [1, 2, 4, 8, 16, 32, 48])],
)
def test_numbers_of_cores_are_doubled(cores, counts):
    assert core_counts(cores) == counts


def test_phases_of_an_engine_are_measured(tiny_checkpoint):
    with scripted_engine("a b c d", model=str(tiny_checkpoint)) as engine:
        found = asyncio.run(measure(EngineTarget(engine), "0", Sizes(tokens=3, sequences=(1, 2), users=2)))
    assert list(found) == [
        "first token, new image",
        "decode step, sequences: 1",
        "decode step, sequences: 2",
        "request, users with new images: 2",
    ]
    assert all(seconds > 0 for seconds in found.values())


def test_efficiency_is_computed_within_a_round():
    one, two = [{"step": 0.4}, {"step": 0.8}, {"step": 0.4}], [{"step": 0.2}, {"step": 0.5}, {"step": 0.25}]
    assert list(table({1: one, 2: two})) == [
        "| phase | 1 cores: ms | efficiency | 2 cores: ms | efficiency |",
        "|---|---|---|---|---|",
        "| step | 400.0 | 1.00 | 250.0 | 0.80 |",
    ]
