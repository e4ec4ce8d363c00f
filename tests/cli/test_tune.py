"""`tune`: measures the kernel sets with a model, prints the times and the choice, and stores it."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest

from dashinfer_vlm_cli import tune as tune_module
from dashinfer_vlm_core.errors import ConfigError
from dashinfer_vlm_core.kernels import bandwidth
from dashinfer_vlm_core.kernels.threads import Machine
from dashinfer_vlm_core.kernels.topology import Core
from dashinfer_vlm_core.kernels.tuned import FOLDER, THREADS_FOLDER
from dashinfer_vlm_core.models.weight_cache import converted
from tests.kernels import needs_native
from tests.quantized_checkpoints import LAYOUTS, write_quantized

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_requests")]


@pytest.fixture
def small_requests(monkeypatch):
    for name, value in {"IMAGE_SIZE": (56, 56), "WORDS": 2, "TOKENS": 2, "AT_ONCE": 2, "MAX_ROUNDS": 2}.items():
        monkeypatch.setattr(tune_module, name, value)
    small = functools.partial(bandwidth.measure_rates, seconds=0, size=1 << 20, width=256)
    monkeypatch.setattr(bandwidth, "measure_rates", small)


@pytest.fixture
def tune(run, tiny_checkpoint, tmp_path):
    """Run `tune` for the tiny model in bfloat16, with an empty cache."""

    def tune(*arguments, **environment):
        options = ("--dtype", "bfloat16", "--device", "cpu", "--cache-dir", tmp_path)
        return run("tune", tiny_checkpoint, *options, *arguments, **environment)

    return tune


def test_times_and_choice_are_printed_stored_and_used(tune, run, tmp_path, tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(converted, "MIN_BYTES", 0)
    output = tune().stdout
    assert not (tmp_path / "weights").exists()  # nothing was stored while it measured
    assert re.search(r"^KERNELS +FIRST TOKEN +NEXT TOKENS +2 AT ONCE +REFERENCE REQUESTS$", output, re.MULTILINE)
    rule = "A set replaces one of higher priority if it takes 10% less time."
    chosen = re.search(rf"^Choice: (\w+)\. {re.escape(rule)}$", output, re.MULTILINE)[1]
    for name in (chosen, "torch"):
        row = rf"^{name} +[\d.,]+ ms +[\d.,]+ ms +[\d.,]+ tokens/s +[\d.,]+ s$"
        assert re.search(row, output, re.MULTILINE)
    (stored,) = re.findall(r"^Stored in (.*)$", output, re.MULTILINE)
    content = json.loads(Path(stored).read_text())
    assert content["chosen"] == chosen
    assert f"\nMemory bandwidth: {content['bandwidth'] / 1e9:,.1f} GB/s\n" in output
    environment = {"MODEL": tiny_checkpoint, "DTYPE": "bfloat16", "DEVICE": "cpu", "CACHE_DIR": tmp_path}
    variables = {f"DASHINFER_VLM_{name}": str(value) for name, value in environment.items()}
    findings = {row["name"]: row for row in json.loads(run("doctor", "--json", **variables).stdout)}
    assert findings["tuned kernels"]["status"] == "ok"
    assert f"{tiny_checkpoint}: {chosen} with " in findings["tuned kernels"]["detail"]
    assert f"{chosen}, measured by `dashinfer-vlm tune` (" in findings["kernels"]["detail"]


@pytest.fixture
def numbers_of_threads(monkeypatch):
    """The numbers of threads that are measured, on a machine with one core that has two threads."""
    machine = Machine(cores=(Core(socket=0, node=0, cpus=(0, 1)),), quota=None)
    monkeypatch.setattr(Machine, "read", lambda: machine)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    numbers = []
    measure = tune_module._measure

    def record(config):
        numbers.append(config.cpu_threads)
        return measure(config)

    monkeypatch.setattr(tune_module, "_measure", record)
    return numbers


def test_threads_are_measured_where_cores_have_several(tune, tmp_path, numbers_of_threads):
    output = tune("--cpu-kernels", "torch").stdout
    chosen = re.search(r"^Threads: ([12])$", output, re.MULTILINE)[1]
    (file,) = (tmp_path / THREADS_FOLDER).iterdir()
    stored = json.loads(file.read_text())
    assert (str(stored["chosen"]), list(stored["seconds"])) == (chosen, ["1", "2"])
    assert set(numbers_of_threads) == {1, 2}
    first = numbers_of_threads.copy()
    file.write_text(json.dumps({**stored, "chosen": 2}))
    tune("--cpu-kernels", "torch")
    assert numbers_of_threads == 2 * first  # not what was chosen before


def test_threads_set_by_the_environment_are_not_measured(tune, tmp_path, numbers_of_threads):
    tune("--cpu-kernels", "torch", OMP_NUM_THREADS="2")
    assert not (tmp_path / THREADS_FOLDER).exists()
    assert set(numbers_of_threads) == {None}


@needs_native
def test_sets_without_the_quantization_are_left_out(tune):
    result = tune("--quantization", "int8")
    assert "torch is left out: " in result.stderr
    assert "KERNELS" in result.stdout
    assert not re.search(r"^torch ", result.stdout, re.MULTILINE)


def test_options_that_no_set_supports_are_rejected(tune):
    with pytest.raises(ConfigError, match="`quantization` 'int8'"):
        tune("--quantization", "int8", "--dtype", "float32")


@needs_native
def test_only_sets_that_keep_stored_bits_are_measured(run, tiny_checkpoint, tmp_path):
    model = write_quantized(tiny_checkpoint, tmp_path, LAYOUTS["awq"]).quantized
    output = run("tune", model, "--device", "cpu", "--dtype", "bfloat16", "--cache-dir", tmp_path / "cache").stdout
    assert "KERNELS" in output
    assert not re.search(r"^(torch|onednn) ", output, re.MULTILINE)


def test_second_measurement_replaces_the_first(tune, tmp_path):
    tune()
    (file,) = (tmp_path / FOLDER).iterdir()
    first = file.stat().st_ino
    tune()
    assert list((tmp_path / FOLDER).iterdir()) == [file]
    assert file.stat().st_ino != first


def test_only_set_is_chosen(run, tiny_checkpoint, tmp_path):
    output = run("tune", tiny_checkpoint, "--dtype", "float32", "--device", "cpu", "--cache-dir", tmp_path).stdout
    assert "Choice: torch. " in output
    assert "onednn" not in output


def test_option_that_overrides_the_choice_is_reported(tune):
    assert (
        "`cpu_kernels` is set to torch: with this option, the result is not used."
        in tune(DASHINFER_VLM_CPU_KERNELS="torch").stderr
    )


def test_unwritable_cache_is_reported(tune, tmp_path):
    (tmp_path / FOLDER).write_text("")
    result = tune()
    assert result.exit_code == 1
    assert result.stdout == ""  # nothing was measured
    problem = f"The cache folder {tmp_path} cannot be written to: File exists. Make it writable, free some space, or"
    assert f"The result cannot be stored. {problem}" in result.stderr
    assert "`export DASHINFER_VLM_CACHE_DIR=FOLDER`" in result.stderr


def test_two_different_models_are_rejected(run):
    result = run("tune", "demo", "--model", "other")
    assert result.exit_code == 2
    assert "MODEL is 'demo', but --model is 'other'. Leave out one of the two." in result.stderr


def test_other_devices_are_rejected(run, tmp_path):
    with pytest.raises(ConfigError, match="only on a CPU, not on meta"):
        run("tune", "demo", "--device", "meta", "--cache-dir", tmp_path)
