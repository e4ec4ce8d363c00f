"""The physical cores, sockets and NUMA nodes of the CPUs that this process may use, and how much of their time.

Sources: Linux's documentation of /sys/devices/system/cpu and of control groups (`cpu.max`, `cpu.cfs_quota_us`,
`memory.max`, `memory.limit_in_bytes`).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

SYS = Path("/sys")
PROC = Path("/proc")

SLOW_CAPACITY = 0.8
"""CPUs with less than this share of the highest capacity are of a slower kind. Equal cores differ by some percent, as
the best ones of a chip may have a higher frequency."""


@dataclass(frozen=True, kw_only=True, order=True)
class Core:
    """A physical core.

    Attributes:
        socket: the number of its package, or of the first one with the same memory: virtual machines often have a
            package for each CPU.
        node: its NUMA node.
        cpus: those of its hardware threads that this process may use, in increasing order.
        is_efficient: whether other cores of the processor are faster (Intel's E cores, Arm's little cores).
    """

    socket: int
    node: int
    cpus: tuple[int, ...]
    is_efficient: bool = False


def allowed_cpus() -> tuple[int, ...]:
    """Return the CPUs that this process may use; all of them where the system cannot restrict that."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(os.getpid())))
    return tuple(range(os.cpu_count() or 1))


def read_cores(cpus: Iterable[int], root: Path = SYS) -> tuple[Core, ...]:
    """Return the physical cores of CPUs, ordered by socket and NUMA node.

    Where the system does not describe a CPU, it counts as a core of the first socket.
    """
    siblings: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for cpu in cpus:
        siblings[_siblings(cpu, root)].append(cpu)
    nodes = dict(_nodes(root))
    efficient = _efficient_cpus(cpus, root)
    cores = [
        Core(
            socket=max(0, _number(_cpu_folder(members[0], root) / "topology" / "physical_package_id")),
            node=nodes.get(members[0], 0),
            cpus=tuple(sorted(members)),
            is_efficient=members[0] in efficient,
        )
        for members in siblings.values()
    ]
    sockets = {core.node: core.socket for core in sorted(cores, reverse=True)}  # the first one of each node
    return tuple(sorted(replace(core, socket=sockets[core.node]) for core in cores))


def read_cpu_quota(proc: Path = PROC, root: Path = SYS) -> float | None:
    """Return how many CPUs' time the control groups of this process permit, such as 2.5; None without a limit."""
    limits = _group_limits("cpu", proc, root, ["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"])
    return min((each[0] / each[1] for each in limits if len(each) == 2 and each[1] > 0), default=None)


def read_memory_limit(proc: Path = PROC, root: Path = SYS) -> int | None:
    """Return how many bytes of memory the control groups of this process permit; None without a limit."""
    limits = _group_limits("memory", proc, root, ["memory.max"], ["memory.limit_in_bytes"])
    return min((each[0] for each in limits if each), default=None)


def parse_cpus(text: str) -> tuple[int, ...]:
    """Parse a list of CPUs such as `0-3,8`."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return tuple(cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1))


def format_cpus(cpus: Iterable[int]) -> str:
    """Return a list of CPUs such as `0-3,8`."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][-1] + 1:
            ranges[-1][1:] = [cpu]
        else:
            ranges.append([cpu])
    return ",".join("-".join(map(str, each)) for each in ranges)


def _cpu_folder(cpu: int, root: Path) -> Path:
    return root / "devices" / "system" / "cpu" / f"cpu{cpu}"


def _siblings(cpu: int, root: Path) -> tuple[int, ...]:
    topology = _cpu_folder(cpu, root) / "topology"
    # Linux before 5.3 has only the second name.
    text = _text(topology / "core_cpus_list") or _text(topology / "thread_siblings_list")
    return parse_cpus(text) or (cpu,)


def _nodes(root: Path) -> Iterator[tuple[int, int]]:
    for folder in (root / "devices" / "system" / "node").glob("node[0-9]*"):
        for cpu in parse_cpus(_text(folder / "cpulist")):
            yield cpu, int(folder.name.removeprefix("node"))


def _efficient_cpus(cpus: Iterable[int], root: Path) -> frozenset[int]:
    """Return the CPUs of the slower kind, unless all are: Intel's by performance counters, others by capacity."""
    atom = frozenset(parse_cpus(_text(root / "devices" / "cpu_atom" / "cpus")))
    capacities = {cpu: _number(_cpu_folder(cpu, root) / "cpu_capacity") for cpu in cpus}
    highest = max(capacities.values(), default=0)
    slow = atom or frozenset(cpu for cpu, each in capacities.items() if 0 <= each < SLOW_CAPACITY * highest)
    return slow if not slow.issuperset(cpus) else frozenset()


def _group_limits(
    controller: str, proc: Path, root: Path, files: Sequence[str], old_files: Sequence[str]
) -> Iterator[list[int]]:
    """Yield the numbers in files of this process's control groups, those of version 1 in `old_files`."""
    mount = root / "fs" / "cgroup"
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            yield from _numbers(mount, path, files)
        elif controller in controllers.split(","):
            for name in (controllers, controller):
                yield from _numbers(mount / name, path, old_files)


def _numbers(mount: Path, path: str, files: Sequence[str]) -> Iterator[list[int]]:
    """Yield the numbers of a group and its parents. In a container, the path may be the host's."""
    relative = Path(path.lstrip("/"))
    for folder in (mount / relative, *(mount / parent for parent in relative.parents)):
        words = " ".join(_text(folder / file) for file in files).split()
        if all(map(str.isdigit, words)):  # not `max` or -1: without a limit
            yield list(map(int, words))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> int:
    try:
        return int(_text(path))
    except ValueError:
        return -1
