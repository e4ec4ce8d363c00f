"""What a CPU-only environment has in place of CUDA: stub libraries for those that DashInfer's extension links, and no
GPU code in the extension.

The dynamic loader requires the libraries and their version names to exist, but resolves a function when it is first
called (`load_libraries` in `worker.py`). On a CPU, DashInfer only registers its GPU code, so the stub libraries define
the few functions that do so. They are compiled on the user's machine, since a binary in the wheel cannot be reviewed.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from dashinfer_vlm_core.errors import MissingDependency

from .environment import Report, run_command

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-shared", "-fPIC", "-nostdlib", "-s", "-fno-builtin", "-Wl,--default-symver")
"""The extension needs most symbols with a version that is named like the library."""

SOURCES: Mapping[str, str] = {
    "libcudart.so.12": """\
void *__cudaRegisterFatBinary(void *code) { return 0; }
void __cudaRegisterFatBinaryEnd(void **code) {}
void __cudaRegisterFunction(void **code) {}
void __cudaRegisterVar(void **code) {}
void __cudaUnregisterFatBinary(void **code) {}
""",
    # DashInfer creates a communicator on one GPU too, but never communicates there.
    "libnccl.so.2": """\
int ncclGetUniqueId(void *id) { return 0; }
int ncclCommInitRank(void **communicator, int ranks) {
    static int one;
    *communicator = &one;
    return ranks == 1 ? 0 : 1;
}
int ncclCommDestroy(void *communicator) { return 0; }
""",
}
"""C sources of the libraries of which functions are called; the others are empty."""

ONE_GPU = ("libcusparse.so.12", "libnccl.so.2", "libnvJitLink.so.12")
"""Libraries that DashInfer does not use on one GPU; it calls cuSPARSE for sparse weights only."""


def find_compiler() -> str:
    """Find a C compiler.

    Raises:
        MissingDependency: there is none; the message explains how to install one.
    """
    for name in COMPILERS:
        if found := shutil.which(name):
            return found
    raise MissingDependency(
        "`--cpu` compiles a few lines of C, but no C compiler was found. Install gcc or clang with"
        " `apt-get install gcc` or `dnf install gcc`."
    )


def compile_stub_libraries(libraries: Iterable[str], folder: Path) -> None:
    """Compile `libraries`, given by their names for the dynamic loader, into `folder`.

    Raises:
        MissingDependency: there is no C compiler.
        SetupError: the compiler failed.
    """
    compiler = find_compiler()
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    for library in libraries:
        output = [f"-Wl,-soname,{library}", "-o", str(folder / library)]
        run_command([compiler, *FLAGS, *output, "-x", "c", "-"], SOURCES.get(library, ""))


def remove_gpu_code(library: Path, report: Report) -> None:
    """Return the disk space of the GPU code in `library`, 755 of its 856 MB, to the file system.

    The file keeps its length and all offsets: its section `.nv_fatbin`, which only a CUDA driver reads, becomes a hole.
    """
    run = functools.partial(subprocess.run, check=True, capture_output=True, text=True)
    try:
        sections = run(["readelf", "--sections", "--wide", str(library)]).stdout
        for offset, size in re.findall(r"\.nv_fatbin +\w+ +\w+ +(\w+) +(\w+)", sections):
            hole = ["--offset", str(int(offset, 16)), "--length", str(int(size, 16))]
            run(["fallocate", "--punch-hole", *hole, str(library)])
    except (OSError, subprocess.CalledProcessError) as error:
        report(f"The GPU code in {library} is kept, which takes 755 MB: {error}.")
