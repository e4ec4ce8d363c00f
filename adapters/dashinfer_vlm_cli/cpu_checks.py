"""The checks of `doctor` for the processor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.findings import Finding
from dashinfer_vlm_core.kernels.devices import cpu_flags
from dashinfer_vlm_core.kernels.threads import Machine, find_threads

FAST_CPU = {"avx512_bf16": "AVX-512 BF16", "amx_bf16": "AMX", "bf16": "Arm BF16", "avx2": "AVX2"}
"""Linux's flags of CPUs that multiply bfloat16 in hardware, or for which there are C kernels."""

SOCKETS_FIX = (
    "Start one server per socket, each with `numactl --cpunodebind=N --membind=N`, behind one address: see"
    " docs/scale-out.md."
)


def check_cpu() -> Finding:
    flags = cpu_flags()
    count = len(Machine.read().cores)
    cores = "1 core" if count == 1 else f"{count} cores"
    fast = [name for flag, name in FAST_CPU.items() if flag in flags]
    if fast or not flags:
        return Finding(name="cpu", status="ok", detail=f"{cores}, bfloat16: {', '.join(fast) or 'unknown'}")
    fix = (
        "On this CPU, `--dtype float32` is usually faster than bfloat16, and needs twice the memory. Ignore this if you"
        " use a GPU."
    )
    return Finding(name="cpu", status="slow", detail=f"{cores}, no fast instructions for bfloat16", fix=fix)


def check_threads(config: EngineConfig) -> Iterator[Finding]:
    yield threads_finding(config, Machine.read())


def threads_finding(config: EngineConfig, machine: Machine) -> Finding:
    """Report the threads of a server with this configuration; one server is slow on several sockets."""
    plan = find_threads(config, machine)
    finding = partial(Finding, name="threads", detail=plan.describe())
    if len(machine.sockets) > 1:
        return finding(status="slow", fix=SOCKETS_FIX)
    return finding(status="ok")
