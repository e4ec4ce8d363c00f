"""Create DashInfer's environment: a CPython 3.10, pinned wheels, and for the CPU stub libraries for CUDA's libraries.

There are two kinds. The full one has torch, which depends on CUDA's libraries, and runs on GPUs and CPUs. The CPU-only
one has DashInfer's wheel and numpy, and takes a thirtieth of the disk space.
A kit contains a third one, for one GPU and without torch, which is unpacked where there is no network.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Container, Iterator
from pathlib import Path

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import MissingDependency, SetupError
from dashinfer_vlm_core.kernels.devices import cuda_devices

from .environment import (
    MARKER,
    PYTHON,
    Environment,
    Report,
    check_space,
    examine,
    find_environment,
    folder_problem,
    locked,
    private_environment,
    private_folder,
    run_command,
)
from .kit import unpack_kit
from .stub_libraries import compile_stub_libraries, find_compiler, remove_gpu_code
from .worker import CUDA_LIBRARIES, DRIVER_LIBRARIES

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
PIP_OPTIONS = ("--no-deps", "--require-hashes", "--only-binary=:all:", "--requirement", "/dev/stdin")
"""With hashes, an index or a proxy cannot replace a package by another one."""

CPU_ONLY_PACKAGES = frozenset({"dashinfer", "numpy"})
"""The packages of `REQUIREMENTS` that a CPU-only environment gets."""

FULL_BYTES = 12 * 10**9
"""The wheels (3.4 GB) and their unpacked size (6.6 GB), with a margin."""
CPU_ONLY_BYTES = 2 * 10**9
"""The wheels (0.32 GB) and their unpacked size (0.9 GB, until the GPU code is removed), with a margin."""

KIT_BYTES = 2 * 10**9
"""The unpacked size (1.5 GB), with a margin."""

EXTENSION = "env/lib/python*/site-packages/dashinfer/allspark/_allspark.cpython-*.so"

PYTHON_VERSION = f"{PYTHON[0]}.{PYTHON[1]}"
NAME = f"python{PYTHON_VERSION}"
_IS_SUITABLE = (
    "import sys, venv, ensurepip; "
    f"sys.exit(sys.implementation.name != 'cpython' or sys.version_info[:2] != {PYTHON} or sys.maxsize < 2**32)"
)


def install(config: EngineConfig, *, python: Path | None, cpu: bool, report: Report, kit: Path | None = None) -> None:
    """Create the private environment unless a working one exists.

    A full environment is kept, since it also runs on a CPU. A CPU-only environment is kept too, unless there is a kit,
    or this machine has a GPU and `cpu` is false.

    Args:
        config: contains the cache folder.
        python: the CPython 3.10 to use; searched for if None.
        cpu: whether to create a CPU-only environment.
        report: is called with a line per step.
        kit: the folder of a kit to unpack, without a network; see `kit.py`.

    Raises:
        MissingDependency: there is no CPython 3.10 or no C compiler; the message explains how to install one.
        SetupError: the platform is not supported, there is too little disk space, the wheels cannot be installed, or
            other users can write to an existing environment.
    """
    _check_platform()
    folder = private_folder(config)
    with locked(folder.with_suffix(".lock")):
        if folder.exists() and (problem := folder_problem(folder)):
            raise SetupError(problem)
        current = _working_environment(config, cpu=cpu, report=report)
        if current is not None and not (current.cpu_only and (kit or (cuda_devices() and not cpu))):
            report(f"DashInfer is already installed{', for the CPU only' * current.cpu_only}.")
            return
        if kit:
            _prepare(folder, KIT_BYTES)
            report(f"Unpacking {kit} into {folder}.")
            unpack_kit(kit, folder)
        else:
            _build(folder, python or find_python(report), report, cpu=cpu)
        _finish(folder)


def _working_environment(config: EngineConfig, *, cpu: bool, report: Report) -> Environment | None:
    try:
        environment = find_environment(config)
    except SetupError:
        return None
    findings = examine(environment)
    if findings.problem and findings.python and cpu and not environment.cpu_only:
        report("Compiling stub libraries for the GPU driver's libraries.")
        compile_stub_libraries(DRIVER_LIBRARIES, environment.stubs)
        findings = examine(environment)
    return None if findings.problem else environment


def find_python(report: Report) -> Path:
    """Find a CPython 3.10: on PATH, in pyenv or in uv; otherwise let uv download one.

    Raises:
        MissingDependency: there is none.
    """
    uv = shutil.which("uv")
    for candidate in _candidates(uv):
        if is_suitable(candidate):
            return candidate
    if uv:
        report(f"Downloading {NAME} with uv.")
        run_command([uv, "python", "install", PYTHON_VERSION])
        return _found_by_uv(uv)
    raise MissingDependency(
        f"DashInfer's wheels are for CPython {PYTHON_VERSION}, but there is none on PATH, in pyenv or in uv. Install"
        " one (`uv python install 3.10`, `pyenv install 3.10`, or your system's python3.10 and python3.10-venv), or"
        " specify one with `--python PATH`."
    )


def is_suitable(python: Path) -> bool:
    """Whether `python` is a CPython 3.10 that can create environments."""
    try:
        command = [str(python), "-I", "-c", _IS_SUITABLE]
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0  # noqa: S603 - an interpreter in the operator's own folders
    except (OSError, subprocess.TimeoutExpired):
        return False


def _check_platform() -> None:
    name = f"{platform.system()} {platform.machine()}"
    if name != "Linux x86_64":
        raise SetupError(f"DashInfer's wheels are for Linux on x86_64, not for {name}. Use another decoder.")


def _candidates(uv: str | None) -> Iterator[Path]:
    if sys.version_info[:2] == PYTHON:
        yield Path(sys.executable)
    if found := shutil.which(NAME):
        yield Path(found)
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    yield from sorted(pyenv.glob(f"versions/{PYTHON_VERSION}.*/bin/{NAME}"), reverse=True)
    if uv:
        yield _found_by_uv(uv)


def _found_by_uv(uv: str) -> Path:
    command = [uv, "python", "find", PYTHON_VERSION]
    return Path(subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.strip())  # noqa: S603 - our own command


def _build(folder: Path, python: Path, report: Report, *, cpu: bool) -> None:
    if cpu:
        find_compiler()  # before an existing environment is replaced
    if not is_suitable(python):
        raise MissingDependency(
            f"{python} is not a CPython {PYTHON_VERSION} with venv. Specify another one with --python."
        )
    _prepare(folder, CPU_ONLY_BYTES if cpu else FULL_BYTES)
    report(f"Creating an environment in {folder} with {python}.")
    run_command([str(python), "-I", "-m", "venv", "--clear", str(folder / "env")])
    if not cpu:
        report("Installing DashInfer and its dependencies: 3.4 GB to download, 6.6 GB on disk.")
        _pip_install(folder)
        return
    report("Compiling stub libraries for the libraries of CUDA and the GPU driver.")
    compile_stub_libraries((*DRIVER_LIBRARIES, *CUDA_LIBRARIES), private_environment(folder).stubs)
    report("Installing DashInfer for the CPU: 0.32 GB to download.")
    _pip_install(folder, CPU_ONLY_PACKAGES)
    for extension in folder.glob(EXTENSION):
        remove_gpu_code(extension, report)


def _prepare(folder: Path, needed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    check_space(folder, needed, "DashInfer")
    (folder / MARKER).unlink(missing_ok=True)


def _pip_install(folder: Path, packages: Container[str] | None = None) -> None:
    pip = [str(private_environment(folder).python), "-m", "pip", "--disable-pip-version-check", "install"]
    run_command([*pip, *PIP_OPTIONS], requirements(packages))


def requirements(packages: Container[str] | None = None) -> str:
    """Return the lines of `REQUIREMENTS` for these packages, or for all."""
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if packages is None or line.partition("==")[0] in packages)


def _finish(folder: Path) -> None:
    findings = examine(private_environment(folder))
    if findings.problem:
        has_no_driver = "libcuda" in findings.problem
        hint = " Without a GPU driver, run `dashinfer-vlm dashinfer install --cpu`." if has_no_driver else ""
        raise SetupError(f"DashInfer was installed, but does not load: {findings.problem}.{hint}")
    (folder / MARKER).write_text(json.dumps(dataclasses.asdict(findings), indent=2), encoding="utf-8")
