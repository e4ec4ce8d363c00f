"""`tune`: measures the kernel sets with a model, prints the figures and the choice, and stores it."""

from __future__ import annotations

import json
import math
import re

import pytest

from dashinfer_vlm_core.errors import ConfigError
from dashinfer_vlm_core.kernels import choice, measure, workload
from dashinfer_vlm_core.kernels.choice_cache import FOLDER

pytestmark = pytest.mark.usefixtures("small_samples")
PASSES = {"text model": [1, 4, 16, 64, 256], "vision encoder": [256, 512]}


@pytest.fixture
def small_samples(monkeypatch):
    monkeypatch.setattr(measure, "SAMPLE_WEIGHTS_PER_THREAD", 2000)
    monkeypatch.setattr(choice, "MAX_SPREAD", math.inf)  # tests run on busy machines


@pytest.fixture
def tune(run, tiny_checkpoint, tmp_path):
    """Run `tune` for the tiny model in bfloat16, with an empty cache."""

    def tune(*arguments, **environment):
        options = ("--dtype", "bfloat16", "--device", "cpu", "--cache-dir", tmp_path)
        return run("tune", tiny_checkpoint, *options, *arguments, **environment)

    return tune


@pytest.fixture
def measured_at_start(monkeypatch):
    """Measure models of every size at start, as if they were large."""
    monkeypatch.setattr(workload, "MIN_MEASURED_WEIGHTS", 0)


@pytest.mark.usefixtures("measured_at_start")
def test_tables_and_choice_are_printed_and_stored(tune, run, tmp_path, tiny_checkpoint):
    output = tune().stdout
    for part, passes in PASSES.items():
        section = output.split(f"The linear layers of the {part}")[1].split("The linear layers")[0]
        header = next(line for line in section.splitlines() if line.startswith("KERNELS"))
        assert header.split()[1 : 1 + len(passes)] == [str(rows) for rows in passes]
        chosen = re.search(r"^Choice: (\w+), since .*\.$", section, re.MULTILINE)[1]
        assert re.search(rf"^{chosen} +[\d.,]+ ms, [\d.,]+ G", section, re.MULTILINE)
        assert re.search(r"^torch +.* ms$", section, re.MULTILINE)
    assert "not stored" not in output
    assert len(list((tmp_path / FOLDER).glob("*.json"))) == 2
    findings = json.loads(run("doctor", "--json", DASHINFER_VLM_CACHE_DIR=str(tmp_path)).stdout)
    (choices,) = [row for row in findings if row["name"] == "kernel choices"]
    assert choices["status"] == "ok"
    for part in PASSES:
        assert f"{tiny_checkpoint.name}, {part}, bfloat16, quantization none: " in choices["detail"]


@pytest.mark.usefixtures("measured_at_start")
def test_choice_is_measured_and_stored_again(tune, tmp_path):
    tune()
    files = sorted((tmp_path / FOLDER).glob("*.json"))
    times = [file.stat().st_mtime_ns for file in files]
    tune()
    assert sorted((tmp_path / FOLDER).glob("*.json")) == files
    assert all(file.stat().st_mtime_ns > time for file, time in zip(files, times, strict=True))


def test_json_has_every_figure(tune, tmp_path):
    parts = json.loads(tune("--json").stdout)
    assert {part["part"]: [row["rows"] for row in part["sets"]["torch"]["passes"]] for part in parts} == PASSES
    for part in parts:
        assert part["chosen"] in part["sets"]
        assert part["stored"] is False
        for figures in part["sets"].values():
            assert figures["reference_request_seconds"] > 0
            assert all(row["ms"] > 0 and row["gb_per_second"] > 0 for row in figures["passes"])
    assert not (tmp_path / FOLDER).exists() or not list((tmp_path / FOLDER).glob("*.json"))


def test_small_model_is_measured_but_not_stored(tune):
    output = tune().stdout
    assert len(re.findall(r"^It is not stored: with [\d,]+ weights, a start selects", output, re.MULTILINE)) == 2


def test_busy_machine_is_reported(tune, monkeypatch):
    monkeypatch.setattr(choice, "MAX_SPREAD", 0.0)
    assert tune().stdout.count("It is not stored: times vary, since other processes use the processor.") == 2


def test_one_set_needs_no_comparison(run, tiny_checkpoint, tmp_path):
    output = run("tune", tiny_checkpoint, "--dtype", "float32", "--device", "cpu", "--cache-dir", tmp_path).stdout
    assert output.count("Choice: torch, since it is the only set that can run the model here.") == 2


def test_option_that_overrides_the_choice_is_reported(tune):
    assert (
        "`cpu_kernels` is set to torch: with this option, the choice is not used."
        in tune(DASHINFER_VLM_CPU_KERNELS="torch").stderr
    )


def test_model_given_twice_is_rejected(run):
    result = run("tune", "demo", "--model", "demo")
    assert result.exit_code == 2
    assert "The model is given twice: as MODEL and by --model." in result.stderr


def test_other_devices_are_rejected(run, tmp_path):
    with pytest.raises(ConfigError, match="kernel sets are measured only on a CPU, not on meta"):
        run("tune", "demo", "--device", "meta", "--cache-dir", tmp_path)
