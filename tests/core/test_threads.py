"""How many threads compute, and on which CPUs."""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import subprocess
import sys

import pytest

from dashinfer_vlm_cli.cpu_checks import threads_finding
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import ConfigError
from dashinfer_vlm_core.kernels.openmp import OPENMP_BINDING, OPENMP_NUMBER, bind_threads
from dashinfer_vlm_core.kernels.threads import configure_threads, find_threads, plan_threads
from dashinfer_vlm_core.kernels.topology import allowed_cpus, parse_cpus
from dashinfer_vlm_core.kernels.tuned import ThreadConditions, TunedThreads, store_tuned
from tests.sys_trees import (
    ALTRA,
    CONTAINER_2_5_CPUS,
    CONTAINER_6_OF_64,
    CORE_13900K,
    EPYC_ADJACENT,
    EPYC_NPS4,
    FAVORED_CORES,
    GUEST_2_NODES,
    GUEST_16_SOCKETS,
    RK3588,
    XEON_8380_TWICE,
    MachineTree,
)

SMALL_QUOTA = MachineTree(cores=[[(0, 1)]], nodes=["0-1"], files={"cpu.max": "50000 100000"})


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in (OPENMP_NUMBER, *OPENMP_BINDING):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (
            XEON_8380_TWICE,
            "40 threads, pinned to CPUs 0-39, one per physical core of one of 2 sockets; the process",
        ),
        (EPYC_ADJACENT, f"16 threads, pinned to CPUs {','.join(map(str, range(0, 32, 2)))}, one per physical core;"),
        (EPYC_NPS4, "64 threads, pinned to CPUs 0-63, one per physical core; the process may use 128 CPUs"),
        (ALTRA, "80 threads, pinned to CPUs 0-79, one per physical core; the process may use 80 CPUs"),
        (CORE_13900K, "8 threads, pinned to CPUs 0,2,4,6,8,10,12,14, one per performance core; the process may use 32"),
        (RK3588, "4 threads, pinned to CPUs 4-7, one per performance core; the process may use 8 CPUs"),
        (FAVORED_CORES, "8 threads, pinned to CPUs 0-7, one per physical core; the process may use 8 CPUs"),
        (GUEST_16_SOCKETS, "16 threads, pinned to CPUs 0-15, one per physical core; the process may use 16 CPUs"),
        (GUEST_2_NODES, "8 threads, pinned to CPUs 0-7, one per physical core of one of 2 sockets; the process may"),
        (CONTAINER_6_OF_64, "6 threads, pinned to CPUs 8-13, one per physical core; the process may use 6 CPUs"),
        (CONTAINER_2_5_CPUS, "2 threads, not pinned, since the process may use the time of 2.5 CPUs"),
        (SMALL_QUOTA, "1 thread, pinned to CPUs 0, one per physical core; the process may use 2 CPUs"),
    ],
)
def test_default_threads_of_a_machine(tree, expected, tmp_path):
    assert plan_threads(tree.read(tmp_path)).describe().startswith(expected)


@pytest.mark.parametrize(
    ("tree", "requested", "cpus"),
    [
        (EPYC_ADJACENT, 4, ""),  # the rest of the cores may be those of another server
        (EPYC_ADJACENT, 32, "0-31"),
        (CORE_13900K, 24, "0,2,4,6,8,10,12,14,16-31"),
        (CORE_13900K, 32, "0-31"),
        (XEON_8380_TWICE, 80, "0-79"),
        (XEON_8380_TWICE, 160, "0-159"),
        (CONTAINER_2_5_CPUS, 3, ""),
    ],
)
def test_requested_threads(tree, requested, cpus, tmp_path):
    plan = plan_threads(tree.read(tmp_path), requested=requested)
    assert (plan.count, tuple(sorted(plan.cpus))) == (requested, parse_cpus(cpus))
    assert plan.reason == f"as set by `cpu_threads` {requested}"


def test_threads_are_ordered_by_node_and_core(tmp_path):
    cpus = plan_threads(EPYC_NPS4.read(tmp_path), requested=128).cpus
    assert cpus[:4] == (0, 64, 1, 65)
    assert [cpu % 64 // 16 for cpu in cpus] == sorted(cpu % 64 // 16 for cpu in cpus)


def test_more_threads_than_cpus_are_rejected(tmp_path):
    with pytest.raises(
        ConfigError, match=r"`cpu_threads` is 7, but this process may use only 6 CPUs\. Lower"
    ) as caught:
        plan_threads(CONTAINER_6_OF_64.read(tmp_path), requested=7)
    assert caught.value.param == "cpu_threads"


def test_variables_of_openmp_are_respected(tmp_path, monkeypatch):
    machine = EPYC_ADJACENT.read(tmp_path)
    monkeypatch.setenv(OPENMP_NUMBER, "16,2")
    assert plan_threads(machine).describe().endswith(", as set by OMP_NUM_THREADS")
    assert plan_threads(machine, requested=3).count == 3
    monkeypatch.setenv("OMP_PLACES", "cores")
    plan = plan_threads(machine)
    assert (plan.count, plan.cpus, plan.reason) == (16, (), "as set by OMP_NUM_THREADS, where OMP_PLACES says")


@pytest.mark.parametrize(
    ("tree", "numbers"),
    [
        (XEON_8380_TWICE, [40, 80, 160, 20]),
        (EPYC_ADJACENT, [16, 32, 8]),
        (CORE_13900K, [8, 24, 32, 4]),
        (RK3588, [4, 8]),
        (CONTAINER_6_OF_64, [6]),
        (CONTAINER_2_5_CPUS, [2]),
    ],
)
def test_numbers_that_are_measured(tree, numbers, tmp_path):
    machine = tree.read(tmp_path)
    assert machine.candidates() == numbers
    for number in numbers:
        assert plan_threads(machine, tuned=number).count == number
    assert plan_threads(machine, tuned=1000).count == numbers[0]  # measured with other CPUs


def test_measured_number_is_used_for_its_model_and_cpus(tmp_path):
    config = EngineConfig(model="demo", cache_dir=tmp_path)
    machine, other = EPYC_ADJACENT.read(tmp_path / "epyc"), ALTRA.read(tmp_path / "altra")
    conditions = ThreadConditions.of(config, machine.candidates())
    store_tuned(config, TunedThreads(conditions=conditions, chosen=32, seconds={16: 2.0, 32: 1.5}))
    assert find_threads(config, machine).reason == "measured by `dashinfer-vlm tune`"
    assert find_threads(config, machine).count == 32
    assert find_threads(config, other).count == 80
    assert find_threads(config.model_copy(update={"quantization": "int8"}), machine).count == 16
    assert find_threads(config.model_copy(update={"cpu_threads": 4}), machine).count == 4


def test_doctor_reports_threads_and_several_sockets(tmp_path):
    finding = threads_finding(EngineConfig(), XEON_8380_TWICE.read(tmp_path / "2"))
    assert (finding.status, finding.detail.split(",")[0]) == ("slow", "40 threads")
    assert "numactl --cpunodebind" in (finding.fix or "")
    finding = threads_finding(EngineConfig(cpu_threads=2), ALTRA.read(tmp_path / "1"))
    assert (finding.status, finding.detail) == ("ok", "2 threads, not pinned, as set by `cpu_threads` 2")


PROGRAM = """
import json, os, sys, threading
from pathlib import Path
{before}
from dashinfer_vlm_core.concurrency.compute import CPU_EXECUTOR
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.kernels.threads import set_threads

plan = set_threads(EngineConfig())
import torch
def compute():
    torch.ones(1 << 20).sum()
    return torch.get_num_threads(), threading.get_native_id()
number, thread = CPU_EXECUTOR.run(compute)
compute()  # in another thread, which is not restricted
masks = {{task: sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}}
print(json.dumps([number, plan.count, plan.cpus, masks[str(thread)], masks[str(os.getpid())], list(masks.values())]))
"""


ESTIMATE = """
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.engine.managed_models import estimate_bytes
assert "torch" not in sys.modules
estimate_bytes(EngineConfig(model="demo"))  # imports torch
"""


COMMAND = """
from click.testing import CliRunner
from dashinfer_vlm_core.cli.main import cli
from dashinfer_vlm_core.plugins import add_commands
add_commands(cli)
assert "torch" not in sys.modules
CliRunner().invoke(cli, ["models", "--fits"])
assert "torch" in sys.modules
"""


@pytest.mark.parametrize("before", ["", ESTIMATE, COMMAND, "import torch; torch.set_num_threads(1)"])
@pytest.mark.skipif(sys.platform != "linux", reason="Threads are pinned on Linux.")
def test_threads_are_pinned_unless_a_program_has_torch(before):
    environment = {name: value for name, value in os.environ.items() if name != OPENMP_NUMBER}
    command = [sys.executable, "-c", PROGRAM.format(before=before)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    number, planned, pinned, compute, main, masks = json.loads(done.stdout)
    cpus = sorted(allowed_cpus())
    assert number == planned
    assert main == cpus
    if before.startswith("import torch"):
        assert number == 1
        assert all(mask == cpus for mask in masks)
    else:
        assert compute == (sorted(pinned) or cpus)
        assert len([mask for mask in masks if len(mask) == 1]) >= number - 1


def test_threads_are_not_pinned_on_a_system_without_affinity(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    assert plan_threads(EPYC_ADJACENT.read(tmp_path)).describe().startswith("16 threads, not pinned, one per physical")


@pytest.mark.skipif(sys.platform != "linux", reason="Threads are pinned on Linux.")
def test_thread_that_cannot_be_pinned_is_an_error(monkeypatch):
    import torch  # noqa: F401 - loads OpenMP

    def refuse_one_cpu(_, cpus):
        if len(cpus) == 1:
            raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse_one_cpu)
    with pytest.raises(OSError, match="Operation not permitted"):
        bind_threads((0, 1))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    with pytest.raises(OSError, match="torch's OpenMP is not compatible with GNU's"):
        bind_threads((0, 1))


@pytest.fixture
def restored_threads():
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    configure_threads(EngineConfig())


@pytest.mark.usefixtures("restored_threads")
def test_number_of_threads_is_set_and_logged(caplog):
    import torch

    caplog.set_level(logging.INFO)
    configure_threads(EngineConfig(cpu_threads=1))
    assert torch.get_num_threads() == 1
    assert "Threads that compute on the CPU: 1 thread" in caplog.text


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.skipif(len(allowed_cpus()) < 2, reason="There is one CPU.")
def test_other_number_of_threads_than_that_of_a_loaded_model_is_a_warning(caplog):
    import torch

    first = EngineConfig(served_model_name="first")
    configure_threads(first)
    count = torch.get_num_threads()
    other = 1 if count > 1 else 2
    warning = f"The model first was loaded with {count} threads, and now computes with"  # there may be others
    configure_threads(EngineConfig(served_model_name="second", cpu_threads=count))
    assert warning not in caplog.text
    configure_threads(EngineConfig(served_model_name="third", cpu_threads=other))
    assert f"{warning} {other}, like third" in caplog.text
    caplog.clear()
    del first
    configure_threads(EngineConfig(cpu_threads=other))
    assert warning not in caplog.text
