"""Physical cores, sockets, NUMA nodes and quotas, as Linux describes them."""

from __future__ import annotations

import os

import pytest

from dashinfer_vlm_core.kernels.topology import (
    Core,
    allowed_cpus,
    format_cpus,
    parse_cpus,
    read_cores,
    read_cpu_quota,
    read_memory_limit,
)
from dashinfer_vlm_core.models import memory
from tests.sys_trees import (
    ALTRA,
    CONTAINER_2_5_CPUS,
    CONTAINER_6_OF_64,
    CORE_13900K,
    EPYC_ADJACENT,
    EPYC_NPS4,
    RK3588,
    XEON_8380_TWICE,
)


@pytest.mark.parametrize(
    ("tree", "cores", "last"),
    [
        (XEON_8380_TWICE, 80, Core(socket=1, node=1, cpus=(79, 159))),
        (EPYC_ADJACENT, 16, Core(socket=0, node=0, cpus=(30, 31))),
        (EPYC_NPS4, 64, Core(socket=0, node=3, cpus=(63, 127))),
        (ALTRA, 80, Core(socket=0, node=0, cpus=(79,))),
        (CORE_13900K, 24, Core(socket=0, node=0, cpus=(31,), is_efficient=True)),
        (CONTAINER_6_OF_64, 6, Core(socket=0, node=0, cpus=(13,))),
    ],
)
def test_cores_are_read(tree, cores, last, tmp_path):
    found = tree.read(tmp_path).cores
    assert (len(found), found[-1]) == (cores, last)
    assert list(found) == sorted(found)


def test_slower_cores_are_known_by_their_capacity(tmp_path):
    assert [core.is_efficient for core in RK3588.read(tmp_path).cores] == [True] * 4 + [False] * 4


def test_cores_are_not_slow_where_all_allowed_ones_are(tmp_path):
    CORE_13900K.read(tmp_path)
    assert not any(core.is_efficient for core in read_cores(range(16, 32), tmp_path / "sys"))


def test_older_names_of_siblings_are_read(tmp_path):
    for cpu in (0, 1):
        folder = tmp_path / "devices" / "system" / "cpu" / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text("0-1\n")
    assert read_cores((0, 1), tmp_path) == (Core(socket=0, node=0, cpus=(0, 1)),)


def test_each_cpu_is_a_core_without_a_description(tmp_path):
    assert read_cores((3, 5), tmp_path) == (Core(socket=0, node=0, cpus=(3,)), Core(socket=0, node=0, cpus=(5,)))


V1 = "4:cpu,cpuacct:/docker/abc\n2:memory:/docker/abc\n"


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/\n", {}, None),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/\n", {"cpu.max": "250000 100000"}, 2.5),
        ("0::/a/b\n", {"a/cpu.max": "150000 50000", "a/b/cpu.max": "max 100000"}, 3),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "50000 100000"}, 0.5),
        ("0::/on/the/host\n", {"cpu.max": "400000 100000"}, 4),
        (V1, {"cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        (V1, {"cpu/cpu.cfs_quota_us": "600000", "cpu/cpu.cfs_period_us": "100000"}, 6),
        ("", {}, None),
    ],
)
def test_quota_is_the_least_of_all_groups(groups, files, quota, tmp_path):
    write_groups(tmp_path, groups, files)
    assert read_cpu_quota(tmp_path / "proc", tmp_path / "sys") == quota


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/\n", {}, None),
        ("1:name=systemd:/other\n0::/a/b\n", {"a/memory.max": "1048576", "a/b/memory.max": "max"}, 1 << 20),
        (V1, {"memory/docker/abc/memory.limit_in_bytes": "2048", "memory/memory.limit_in_bytes": "4096"}, 2048),
        (V1, {"memory/memory.limit_in_bytes": "4096"}, 4096),
    ],
)
def test_memory_limit_is_the_least_of_all_groups(groups, files, limit, tmp_path):
    write_groups(tmp_path, groups, files)
    assert read_memory_limit(tmp_path / "proc", tmp_path / "sys") == limit


def write_groups(folder, groups, files):
    texts = {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{path}": text for path, text in files.items()}}
    for path, text in texts.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_memory_limit_is_at_most_the_machines(monkeypatch):
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit, expected in ((None, machine), (2 * machine, machine), (1 << 20, 1 << 20)):
        monkeypatch.setattr(memory, "read_memory_limit", lambda limit=limit: limit)
        assert memory.memory_limit() == expected


def test_quota_of_a_container_is_read(tmp_path):
    assert CONTAINER_2_5_CPUS.read(tmp_path).quota == 2.5


@pytest.mark.parametrize(
    ("text", "cpus"), [("0", (0,)), ("0-3,8,10-11", (0, 1, 2, 3, 8, 10, 11)), ("1,3", (1, 3)), ("", ())]
)
def test_lists_of_cpus(text, cpus):
    assert (parse_cpus(text), format_cpus(cpus)) == (cpus, text)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="This system does not restrict processes to CPUs.")
def test_cpus_of_this_process_are_its_affinity():
    assert set(allowed_cpus()) == os.sched_getaffinity(os.getpid())
    assert sum(len(core.cpus) for core in read_cores(allowed_cpus())) == len(allowed_cpus())
