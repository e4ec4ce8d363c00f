"""`tune`: measures the kernel sets with a model, prints the times and the choice, and stores it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dashinfer_vlm_core.errors import ConfigError
from dashinfer_vlm_core.kernels import measure
from dashinfer_vlm_core.kernels.tuned import FOLDER

pytestmark = pytest.mark.usefixtures("small_samples")
PASSES = {"text model": [1, 4, 16, 64, 256], "vision encoder": [256, 512]}


@pytest.fixture
def small_samples(monkeypatch):
    monkeypatch.setattr(measure, "SAMPLE_WEIGHTS", 2000)
    monkeypatch.setattr(measure, "PASS_SECONDS", 0)


@pytest.fixture
def tune(run, tiny_checkpoint, tmp_path):
    """Run `tune` for the tiny model in bfloat16, with an empty cache."""

    def tune(*arguments, **environment):
        options = ("--dtype", "bfloat16", "--device", "cpu", "--cache-dir", tmp_path)
        return run("tune", tiny_checkpoint, *options, *arguments, **environment)

    return tune


def test_times_and_choice_are_printed_and_stored(tune, run, tmp_path, tiny_checkpoint):
    output = tune().stdout
    for part, passes in PASSES.items():
        section = output.split(f"The linear layers of the {part}")[1].split("The linear layers")[0]
        header = next(line for line in section.splitlines() if line.startswith("KERNELS"))
        assert header.split()[1 : 1 + len(passes)] == [str(rows) for rows in passes]
        chosen = re.search(r"^Choice: (\w+), since .*\.$", section, re.MULTILINE)[1]
        assert re.search(rf"^{chosen} +[\d.,]+ ms, [\d.,]+ G", section, re.MULTILINE)
        assert re.search(r"^torch +.* ms$", section, re.MULTILINE)
        (stored,) = re.findall(r"^Stored in (.*)$", section, re.MULTILINE)
        assert json.loads(Path(stored).read_text())["chosen"] == chosen
    assert len(list((tmp_path / FOLDER).iterdir())) == 2
    findings = json.loads(run("doctor", "--json", DASHINFER_VLM_CACHE_DIR=str(tmp_path)).stdout)
    (tuned,) = [row for row in findings if row["name"] == "tuned kernels"]
    assert tuned["status"] == "ok"
    for part in PASSES:
        assert f"{tiny_checkpoint.name}, {part}: " in tuned["detail"]


def test_second_measurement_replaces_the_first(tune, tmp_path):
    tune()
    files = {file: file.stat().st_ino for file in (tmp_path / FOLDER).iterdir()}
    tune()
    again = {file: file.stat().st_ino for file in (tmp_path / FOLDER).iterdir()}
    assert files.keys() == again.keys()
    assert all(files[file] != again[file] for file in files)


def test_one_set_needs_no_comparison(run, tiny_checkpoint, tmp_path):
    output = run("tune", tiny_checkpoint, "--dtype", "float32", "--device", "cpu", "--cache-dir", tmp_path).stdout
    assert output.count("Choice: torch, since it is the only set that can run the model here.") == 2


def test_option_that_overrides_the_choice_is_reported(tune):
    assert (
        "`cpu_kernels` is set to torch: with this option, the result is not used."
        in tune(DASHINFER_VLM_CPU_KERNELS="torch").stderr
    )


def test_unwritable_cache_is_reported(tune, tmp_path):
    (tmp_path / FOLDER).write_text("")
    result = tune()
    assert result.exit_code == 1
    assert "The result cannot be stored: " in result.stderr
    assert "Choose another --cache-dir." in result.stderr


def test_model_given_twice_is_rejected(run):
    result = run("tune", "demo", "--model", "demo")
    assert result.exit_code == 2
    assert "The model is given twice: as MODEL and by --model." in result.stderr


def test_other_devices_are_rejected(run, tmp_path):
    with pytest.raises(ConfigError, match="only on a CPU, not on meta"):
        run("tune", "demo", "--device", "meta", "--cache-dir", tmp_path)
