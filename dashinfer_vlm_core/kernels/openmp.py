"""The OpenMP runtime that torch and the C kernels share: its variables, and pinning its threads.

Its variables (OMP_PLACES, OMP_PROC_BIND) are read only when torch is loaded, and would also pin every other
thread that computes to the first CPU, with all processes that it starts.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Sequence

OPENMP_NUMBER = "OMP_NUM_THREADS"
OPENMP_BINDING = ("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY")

_REGION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def environment_threads() -> int | None:
    """Return the number of threads that the environment sets, if any."""
    first = os.environ.get(OPENMP_NUMBER, "").partition(",")[0].strip()  # one number per level of nesting
    return int(first) if first.isdecimal() and int(first) > 0 else None


def environment_binding() -> str:
    """Return the name of a variable by which OpenMP itself pins threads; empty if none is set."""
    return next((name for name in OPENMP_BINDING if os.environ.get(name)), "")


def bind_threads(cpus: Sequence[int]) -> None:
    """Restrict the calling thread to these CPUs, and each thread of its OpenMP team but itself to one of them.

    Threads that OpenMP starts later, because a library computed with fewer ones in between, inherit the restriction.

    Args:
        cpus: as many as torch has threads in this one.

    Raises:
        OSError: a thread does not have its own CPU, because the system did not permit it, or because torch's OpenMP is
            not GNU's or compatible with it.
    """
    os.sched_setaffinity(0, cpus)
    torch_libraries = ctypes.CDLL(sys.modules["torch._C"].__file__)
    try:
        parallel = torch_libraries.GOMP_parallel
        thread_number = torch_libraries.omp_get_thread_num
    except AttributeError:
        raise OSError(errno.ENOTSUP, "torch's OpenMP is not compatible with GNU's") from None
    errors: list[OSError] = []

    def bind(_: int | None) -> None:
        if number := thread_number():
            try:
                os.sched_setaffinity(0, cpus[number : number + 1])
            except OSError as error:
                errors.append(error)  # C code that calls this function would ignore it

    parallel(_REGION(bind), None, ctypes.c_uint(len(cpus)), ctypes.c_uint(0))
    if errors:
        raise errors[0]
