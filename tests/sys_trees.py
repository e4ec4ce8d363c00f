"""/sys and /proc of published machines, as far as the threads of the engine depend on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dashinfer_vlm_core.kernels.threads import Machine
from dashinfer_vlm_core.kernels.topology import parse_cpus, read_cores, read_cpu_quota


@dataclass(frozen=True, kw_only=True)
class MachineTree:
    """A machine, and what a process on it may use.

    Attributes:
        cores: the CPUs of each physical core, by socket.
        nodes: the CPUs of each NUMA node.
        allowed: the CPUs that the process may use; all by default.
        efficient: E cores of Intel's hybrid processors.
        capacities: the capacity of each CPU, which Linux reports for Arm.
        groups: /proc/self/cgroup of the process.
        files: the files of its control groups.
    """

    cores: Sequence[Sequence[Sequence[int]]]
    nodes: Sequence[str]
    allowed: str = ""
    efficient: str = ""
    capacities: Mapping[int, int] = field(default_factory=dict)
    groups: str = "0::/\n"
    files: Mapping[str, str] = field(default_factory=dict)

    def read(self, folder: Path) -> Machine:
        """Write the files to a folder and read them."""
        sys, proc = folder / "sys", folder / "proc"
        for path, text in self._files():
            file = sys / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
        (proc / "self").mkdir(parents=True)
        (proc / "self" / "cgroup").write_text(self.groups)
        everything = [cpu for socket in self.cores for core in socket for cpu in core]
        allowed = parse_cpus(self.allowed) if self.allowed else sorted(everything)
        return Machine(cores=read_cores(allowed, sys), quota=read_cpu_quota(proc, sys))

    def _files(self):
        for number, socket in enumerate(self.cores):
            for core in socket:
                for cpu in core:
                    folder = f"devices/system/cpu/cpu{cpu}/topology"
                    yield f"{folder}/physical_package_id", number
                    yield f"{folder}/core_cpus_list", ",".join(map(str, core))
        for number, cpus in enumerate(self.nodes):
            yield f"devices/system/node/node{number}/cpulist", cpus
        if self.efficient:
            yield "devices/cpu_atom/cpus", self.efficient
        for cpu, capacity in self.capacities.items():
            yield f"devices/system/cpu/cpu{cpu}/cpu_capacity", capacity
        for path, text in self.files.items():
            yield f"fs/cgroup/{path}", text


def _pairs(first: int, count: int, *, distance: int) -> list[tuple[int, ...]]:
    return [(cpu, cpu + distance) for cpu in range(first, first + count)]


XEON_8380_TWICE = MachineTree(
    cores=[_pairs(0, 40, distance=80), _pairs(40, 40, distance=80)],
    nodes=["0-39,80-119", "40-79,120-159"],
)
"""Two Xeon Platinum 8380 with hyperthreads: the second threads are numbered after all first ones."""

EPYC_ADJACENT = MachineTree(cores=[[(cpu, cpu + 1) for cpu in range(0, 32, 2)]], nodes=["0-31"])
"""A virtual machine with 16 cores of an EPYC 7763, whose threads have adjacent numbers."""

EPYC_NPS4 = MachineTree(
    cores=[_pairs(0, 64, distance=64)],
    nodes=["0-15,64-79", "16-31,80-95", "32-47,96-111", "48-63,112-127"],
)
"""An EPYC 7763 divided into four NUMA nodes."""

ALTRA = MachineTree(cores=[[(cpu,) for cpu in range(80)]], nodes=["0-79"])
"""An Ampere Altra Q80-30: 80 cores without hyperthreads."""

CORE_13900K = MachineTree(
    cores=[[*((cpu, cpu + 1) for cpu in range(0, 16, 2)), *((cpu,) for cpu in range(16, 32))]],
    nodes=["0-31"],
    efficient="16-31",
)
"""A Core i9-13900K: 8 P cores with two threads, 16 E cores with one."""

RK3588 = MachineTree(
    cores=[[(cpu,) for cpu in range(8)]],
    nodes=["0-7"],
    capacities={**dict.fromkeys(range(4), 530), **dict.fromkeys(range(4, 8), 1024)},
)
"""A Rockchip RK3588: four Cortex-A55 and four Cortex-A76."""

FAVORED_CORES = MachineTree(
    cores=[[(cpu,) for cpu in range(8)]],
    nodes=["0-7"],
    capacities={**dict.fromkeys(range(8), 980), 2: 1024, 3: 1024},
)
"""Eight equal cores, two of which reach a higher frequency (Turbo Boost Max 3.0)."""

GUEST_16_SOCKETS = MachineTree(cores=[[(cpu,)] for cpu in range(16)], nodes=["0-15"])
"""A virtual machine with 16 CPUs in 16 sockets, as libvirt makes it without `<topology>`."""

GUEST_2_NODES = MachineTree(cores=[[(cpu,)] for cpu in range(16)], nodes=["0-7", "8-15"])
"""The same one on two NUMA nodes."""

CONTAINER_6_OF_64 = MachineTree(
    cores=[_pairs(0, 32, distance=32)], nodes=["0-63"], allowed="8-13", files={"cpu.max": "max 100000"}
)
"""`docker run --cpuset-cpus 8-13` on 32 cores with hyperthreads."""

CONTAINER_2_5_CPUS = MachineTree(cores=[_pairs(0, 32, distance=32)], nodes=["0-63"], files={"cpu.max": "250000 100000"})
"""`docker run --cpus 2.5` on the same machine."""
