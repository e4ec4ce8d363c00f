"""`benchmarks.compare` with servers that respond at once; nothing here measures speed."""

from __future__ import annotations

import sys

import pytest

from benchmarks import compare
from benchmarks.environments import OtherEngines
from benchmarks.limits import Rates

SERVER = f"""
import sys
from pathlib import Path

sys.path.insert(0, {str(OtherEngines.script("."))!r})
from wire import serve

serve(lambda chat: ["a"] * chat.max_tokens, model=Path(sys.argv[1]), port=int(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory, tiny_checkpoint):
    """Compare two engines in one round."""
    folder = tmp_path_factory.mktemp("compare")
    (folder / "server.py").write_text(SERVER)
    command = f"{sys.executable} {folder / 'server.py'} {{model}} {{port}}"
    engines = ["--engines", "", "--engine", f"steady={command}", "--engine", f"other={command}"]
    work = ["--workloads", "text-8,decode-1", "--quick", "--rounds", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "measure_rates", lambda: Rates(read_gb_s=1.0, bf16_gflop_s=1.0, kernels="torch"))
        return compare.main(["--model", str(tiny_checkpoint), *engines, *work, "--out", str(folder)])


def test_time_to_ready_is_that_of_each_engine(results):
    (row,) = [row for row in results.rows if row.workload == "ready"]
    assert results.figures[row].keys() == {"steady", "other"}
