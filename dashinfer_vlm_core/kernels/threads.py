"""How many threads compute on a CPU, and on which CPUs.

A thread per physical core: two on the hyperthreads of a core share its arithmetic units, and end a step later than one.
On hybrid processors, a step would wait for the slower cores; on several sockets, for the memory of the others. The
number is for one process: the threads of all its models are the same.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakValueDictionary

from ..concurrency.compute import CPU_EXECUTOR
from ..config import EngineConfig
from ..errors import ConfigError
from .openmp import OPENMP_NUMBER, bind_threads, environment_binding, environment_threads
from .topology import Core, allowed_cpus, format_cpus, read_cores, read_cpu_quota
from .tuned import ThreadConditions, load_threads

MANY_CORES = 8
"""From this number on, fewer threads than cores can be faster: they wait for each other a hundred times per step."""

logger: logging.Logger = logging.getLogger(__name__)

_LOADED: WeakValueDictionary[tuple[int, int], EngineConfig] = WeakValueDictionary()
"""The configurations of loaded models by `id`, as some cannot be hashed, and the number of threads at their start."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a number of threads is chosen by.

    Attributes:
        cores: the physical cores with CPUs that this process may use, ordered by socket and NUMA node.
        quota: how many CPUs' time it may use; None without a limit.
    """

    cores: tuple[Core, ...]
    quota: float | None

    @classmethod
    def read(cls) -> Machine:
        """Return this machine."""
        return cls(cores=read_cores(allowed_cpus()), quota=read_cpu_quota())

    @property
    def sockets(self) -> list[int]:
        return sorted({core.socket for core in self.cores})

    @property
    def num_cpus(self) -> int:
        return sum(len(core.cpus) for core in self.cores)

    def fast_cores(self) -> list[Core]:
        """Return the cores that are used by default: of the socket with most of them, those that are not slower."""
        fast = [core for core in self.cores if not core.is_efficient]
        largest = Counter(core.socket for core in fast).most_common(1)[0][0]
        return [core for core in fast if core.socket == largest]

    def cpus(self, count: int) -> tuple[int, ...]:
        """Return the CPUs for so many threads: those of the default, other sockets, slower cores, and hyperthreads."""
        default = self.fast_cores()
        order = sorted(self.cores, key=lambda core: (core not in default, core.is_efficient, core))
        threads = max(len(core.cpus) for core in order)
        found = [(core, core.cpus[i]) for i in range(threads) for core in order if i < len(core.cpus)]
        return tuple(cpu for _, cpu in sorted(found[:count]))

    def limit(self, count: int) -> int:
        """Return the number of threads that the quota permits: with more, the system stops all of them for a time."""
        return count if self.quota is None else max(1, min(count, int(self.quota)))

    def candidates(self) -> list[int]:
        """Return numbers of threads that can be the fastest, with the default first."""
        fast = [core for core in self.cores if not core.is_efficient]
        default = len(self.fast_cores())
        numbers = [default, len(fast), len(self.cores), self.num_cpus]
        if default >= MANY_CORES:
            numbers.append(default // 2)
        return list(dict.fromkeys(map(self.limit, numbers)))


@dataclass(frozen=True, kw_only=True)
class ThreadPlan:
    """The threads that compute.

    Attributes:
        count: their number.
        cpus: the CPU of each thread; empty if the system chooses.
        reason: why these, as a part of a sentence.
    """

    count: int
    cpus: tuple[int, ...]
    reason: str

    def describe(self) -> str:
        threads = "1 thread" if self.count == 1 else f"{self.count} threads"
        cpus = f", pinned to CPUs {format_cpus(self.cpus)}" if self.cpus else ", not pinned"
        return f"{threads}{cpus}, {self.reason}"


def plan_threads(machine: Machine, *, requested: int | None = None, tuned: int | None = None) -> ThreadPlan:
    """Choose the threads of a process that has the machine's CPUs to itself.

    Threads are pinned if they use all cores of their kind: a process with fewer threads shares these cores with others,
    which may have chosen the same ones.

    Args:
        machine: where they run.
        requested: the option `cpu_threads`.
        tuned: the number that `dashinfer-vlm tune` measured to be the fastest.

    Raises:
        ConfigError: there are fewer CPUs than requested threads.
    """
    cores = len(machine.fast_cores())
    if requested is not None:
        count = _checked(machine, requested)
        reason = f"as set by `cpu_threads` {requested}"
    elif number := environment_threads():
        count = number
        reason = f"as set by {OPENMP_NUMBER}"
    elif tuned is not None and tuned in machine.candidates():
        count = tuned
        reason = "measured by `dashinfer-vlm tune`"
    else:
        count = machine.limit(cores)
        reason = _default_reason(machine, count)
    binding = environment_binding()
    if binding:
        reason += f", where {binding} says"
    can_pin = not binding and hasattr(os, "sched_setaffinity")
    cpus = machine.cpus(count) if can_pin and cores <= count <= machine.num_cpus else ()
    return ThreadPlan(count=count, cpus=cpus, reason=reason)


def find_threads(config: EngineConfig, machine: Machine) -> ThreadPlan:
    """Return the threads of a process with this configuration.

    Raises:
        ConfigError: there are fewer CPUs than `cpu_threads`.
    """
    tuned = load_threads(config, ThreadConditions.of(config, machine.candidates()))
    return plan_threads(machine, requested=config.cpu_threads, tuned=tuned)


def configure_threads(config: EngineConfig) -> None:
    """Set the threads of this process for a model, and log them. Another number than that of a loaded model is a
    warning.

    Args:
        config: exists as long as the model is loaded.

    Raises:
        ConfigError: there are fewer CPUs than `cpu_threads`.
    """
    count = set_threads(config).count
    for (_, before), other in list(_LOADED.items()):
        if before != count:
            logger.warning(
                "The model %s was loaded with %d threads, and now computes with %d, like %s: all models of a process"
                " have the same threads. Set the same `cpu_threads` for all.",
                other.name,
                before,
                count,
                config.name,
            )
    _LOADED[id(config), count] = config


def set_threads(config: EngineConfig) -> ThreadPlan:
    """Set the threads of this process, and log them.

    Raises:
        ConfigError: there are fewer CPUs than `cpu_threads`.
    """
    plan = threads_of_process(config)
    importlib.import_module("torch").set_num_threads(plan.count)  # for threads that start later
    CPU_EXECUTOR.set_up(partial(_set_up_thread, plan.count, plan.cpus))
    logger.info("Threads that compute on the CPU: %s.", plan.describe())
    return plan


def threads_of_process(config: EngineConfig) -> ThreadPlan:
    """Return the threads of this process for a model.

    In a program that has imported torch before, threads are pinned only with `cpu_threads`, and there are at most as
    many as it has set: its other threads and processes compute on the same cores.

    Raises:
        ConfigError: there are fewer CPUs than `cpu_threads`.
    """
    limit = program_threads()
    plan = find_threads(config, Machine.read())
    if config.cpu_threads is None and limit is not None:
        if limit < plan.count:
            plan = replace(plan, count=limit, reason="as set by the program that imported torch")
        plan = replace(plan, cpus=())
    return plan


@functools.cache
def program_threads() -> int | None:
    """Return the number of threads that the program set; None if it had not imported torch at the first call, which
    comes before the one of this package."""
    torch = sys.modules.get("torch")
    return None if torch is None else int(torch.get_num_threads())


def _set_up_thread(count: int, cpus: Sequence[int]) -> None:
    importlib.import_module("torch").set_num_threads(count)
    if not cpus:
        return
    try:
        bind_threads(cpus)
    except OSError as error:
        logger.warning("Threads are not pinned to CPUs %s: %s.", format_cpus(cpus), error.strerror)


def _checked(machine: Machine, requested: int) -> int:
    if requested <= machine.num_cpus:
        return requested
    raise ConfigError(
        f"`cpu_threads` is {requested}, but this process may use only {machine.num_cpus} CPUs. Lower it, or start the"
        " process with more CPUs (`taskset`, `--cpuset-cpus`).",
        param="cpu_threads",
    )


def _default_reason(machine: Machine, count: int) -> str:
    cores = machine.fast_cores()
    if count < len(cores):
        return f"since the process may use the time of {machine.quota:g} CPUs"
    reason = "one per physical core"
    if any(core.is_efficient for core in machine.cores):
        reason = "one per performance core"
    if len(machine.sockets) > 1:
        reason += f" of one of {len(machine.sockets)} sockets"
    return f"{reason}; the process may use {machine.num_cpus} CPUs"
