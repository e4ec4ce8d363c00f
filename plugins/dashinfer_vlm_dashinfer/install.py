"""Create DashInfer's environment: a CPython 3.10, pinned wheels, and for the CPU stub libraries for CUDA's libraries.

There are two kinds. The full one has torch, which depends on CUDA's libraries, and runs on GPUs and CPUs. The CPU-only
one has DashInfer's wheel and numpy, and takes a thirtieth of the disk space.
A kit contains a third one, for one GPU and without torch, which is unpacked where there is no network.
"""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Container, Iterator
from pathlib import Path

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import MissingDependency, SetupError
from dashinfer_vlm_core.kernels.devices import cuda_devices

from .environment import (
    MARKER,
    PYTHON,
    Findings,
    examine,
    find_environment,
    folder_problem,
    locked,
    private_environment,
    private_folder,
    stub_libraries_folder,
    write_json,
)
from .gpu_code import remove_gpu_code
from .kit import unpack_kit
from .stub_libraries import ALL, DRIVER, compile_stub_libraries, find_compiler

Report = Callable[[str], None]

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
REQUIREMENTS_OPTIONS = ("--no-deps", "--require-hashes", "--only-binary=:all:", "--requirement")
"""Of pip, before the file: an index or a proxy cannot replace a package by another one."""

CPU_ONLY_PACKAGES = frozenset({"dashinfer", "numpy"})
"""The packages of `REQUIREMENTS` that a CPU-only environment gets."""

FULL_BYTES = 12 * 10**9
"""The wheels (3.4 GB) and their unpacked size (6.6 GB), with a margin."""
CPU_ONLY_BYTES = 2 * 10**9
"""The wheels (0.32 GB) and their unpacked size (0.9 GB, until the GPU code is removed), with a margin."""

KIT_BYTES = 2 * 10**9
"""The unpacked size (1.5 GB), with a margin."""

EXTENSION = "env/lib/python*/site-packages/dashinfer/allspark/_allspark.cpython-*.so"

UMASK = 0o022
"""Of the programs that write the environment: it is executed, so only its owner may write to it."""

NAME = f"python{PYTHON[0]}.{PYTHON[1]}"
_IS_SUITABLE = (
    "import sys, venv, ensurepip; "
    f"sys.exit(sys.implementation.name != 'cpython' or sys.version_info[:2] != {PYTHON} or sys.maxsize < 2**32)"
)


def install(
    config: EngineConfig, *, python: Path | None, cpu: bool, report: Report, kit: Path | None = None
) -> Findings:
    """Create the private environment unless a working one exists; returns the findings of its examination.

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
    with locked(folder.with_suffix(".lock")) as waited:
        if waited:
            report("Waited for another installation.")
        if folder.exists() and (problem := folder_problem(folder)):
            raise SetupError(problem)
        findings = _working_findings(config, cpu=cpu, report=report)
        if findings is not None and not (findings.cpu_only and (kit or (cuda_devices() and not cpu))):
            report(f"DashInfer {findings.version} is already installed{', for the CPU only' * findings.cpu_only}.")
            return findings
        if kit:
            return _unpack(kit, folder, report)
        if cpu:
            return _build_cpu_only(folder, python or find_python(report), report)
        return _build_full(folder, python or find_python(report), report)


def _working_findings(config: EngineConfig, *, cpu: bool, report: Report) -> Findings | None:
    """Examine the environment that would be used; None if there is none, or it does not load.

    If `cpu` is true, an environment that lacks only the GPU driver's libraries gets stub libraries for these.
    """
    try:
        environment = find_environment(config)
        findings = examine(environment)
        if findings.problem and cpu and findings.python and not findings.cpu_only:
            compile_driver_stubs(private_folder(config) / "stubs", report)
            findings = examine(find_environment(config))
    except MissingDependency:
        return None
    return None if findings.problem else findings


def find_python(report: Report) -> Path:
    """Find a CPython 3.10: on PATH, in pyenv or in uv; otherwise let uv download one.

    Raises:
        MissingDependency: there is none.
    """
    for candidate in _candidates():
        if is_suitable(candidate):
            return candidate
    if uv := shutil.which("uv"):
        report(f"Downloading {NAME} with uv.")
        _run([uv, "python", "install", f"{PYTHON[0]}.{PYTHON[1]}"])
        for candidate in _found_by_uv(uv):
            if is_suitable(candidate):
                return candidate
    raise MissingDependency(
        f"DashInfer's wheels are for CPython {PYTHON[0]}.{PYTHON[1]}, but there is none on PATH, in pyenv or in uv."
        " Install one (`uv python install 3.10`, `pyenv install 3.10`, or your system's python3.10 and"
        " python3.10-venv), or specify one with `--python PATH`."
    )


def is_suitable(python: Path) -> bool:
    """Whether `python` is a CPython 3.10 that can create environments."""
    try:
        command = [str(python), "-I", "-c", _IS_SUITABLE]
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0  # noqa: S603 - an interpreter in the operator's own folders
    except (OSError, subprocess.TimeoutExpired):
        return False


def compile_driver_stubs(folder: Path, report: Report) -> None:
    """Compile stub libraries for the GPU driver's libraries unless they exist.

    Raises:
        MissingDependency: there is no C compiler.
        SetupError: the compilation failed.
    """
    if all((folder / library.soname).exists() for library in DRIVER):
        return
    report("Compiling stub libraries for the GPU driver's libraries.")
    compile_stub_libraries(DRIVER, folder)


def _check_platform() -> None:
    name = f"{platform.system()} {platform.machine()}"
    if name != "Linux x86_64":
        raise SetupError(f"DashInfer's wheels are for Linux on x86_64, not for {name}. Use another decoder.")


def _candidates() -> Iterator[Path]:
    if sys.version_info[:2] == PYTHON:
        yield Path(sys.executable)
    if found := shutil.which(NAME):
        yield Path(found)
    roots = [Path("~/.pyenv").expanduser()]
    if pyenv := shutil.which("pyenv"):
        roots.insert(0, Path(_output([pyenv, "root"])))
    for root in roots:
        yield from sorted(root.glob(f"versions/{PYTHON[0]}.{PYTHON[1]}.*/bin/{NAME}"), reverse=True)
    if uv := shutil.which("uv"):
        yield from _found_by_uv(uv)


def _found_by_uv(uv: str) -> Iterator[Path]:
    if found := _output([uv, "python", "find", f"{PYTHON[0]}.{PYTHON[1]}"]):
        yield Path(found)


def _build_full(folder: Path, python: Path, report: Report) -> Findings:
    _make_environment(folder, python, FULL_BYTES, report)
    report("Installing DashInfer and its dependencies: 3.4 GB to download, 6.6 GB on disk.")
    _pip_install(folder)
    return _finish(folder)


def _build_cpu_only(folder: Path, python: Path, report: Report) -> Findings:
    find_compiler()  # before an existing environment is replaced
    _make_environment(folder, python, CPU_ONLY_BYTES, report)
    report("Compiling stub libraries for the libraries of CUDA and the GPU driver.")
    compile_stub_libraries(ALL, stub_libraries_folder(private_environment(folder).python))
    report("Installing DashInfer for the CPU: 0.32 GB to download.")
    _pip_install(folder, CPU_ONLY_PACKAGES)
    removed = sum(remove_gpu_code(path) for path in folder.glob(EXTENSION))
    if removed:
        report(f"Removed the GPU code of DashInfer's extension: {removed / 1e6:.0f} MB of disk space freed.")
    return _finish(folder, gpu_code_removed=removed)


def _unpack(kit: Path, folder: Path, report: Report) -> Findings:
    _check_space(folder, KIT_BYTES)
    (folder / MARKER).unlink(missing_ok=True)
    report(f"Unpacking {kit} into {folder}.")
    unpack_kit(kit, folder)
    return _finish(folder)


def _make_environment(folder: Path, python: Path, needed: int, report: Report) -> None:
    if not is_suitable(python):
        raise MissingDependency(
            f"{python} is not a CPython {PYTHON[0]}.{PYTHON[1]} with venv. Specify another one with --python."
        )
    _check_space(folder, needed)
    (folder / MARKER).unlink(missing_ok=True)
    report(f"Creating an environment in {folder} with {python}.")
    _run([str(python), "-I", "-m", "venv", "--clear", str(folder / "env")])


def _pip_install(folder: Path, packages: Container[str] | None = None) -> None:
    pip = [str(private_environment(folder).python), "-m", "pip", "--disable-pip-version-check", "install"]
    with requirements_file(packages) as file:
        _run([*pip, *REQUIREMENTS_OPTIONS, str(file)])


@contextlib.contextmanager
def requirements_file(packages: Container[str] | None = None) -> Iterator[Path]:
    """Yield a file with the lines of `REQUIREMENTS` for these packages, or for all."""
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines(keepends=True)
    chosen = [line for line in lines if packages is None or line.partition("==")[0] in packages]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, REQUIREMENTS.name)
        file.write_text("".join(chosen), encoding="utf-8")
        yield file


def _finish(folder: Path, **record: int) -> Findings:
    """Check that the environment works, and only then mark it as installed; `record` is stored with the findings."""
    findings = examine(private_environment(folder))
    if findings.problem:
        has_no_driver = "libcuda" in findings.problem
        hint = " Without a GPU driver, run `dashinfer-vlm dashinfer install --cpu`." if has_no_driver else ""
        raise SetupError(f"DashInfer was installed, but does not load: {findings.problem}.{hint}")
    write_json(folder / MARKER, dataclasses.asdict(findings) | record)
    return findings


def _check_space(folder: Path, needed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise SetupError(
            f"{folder} has {free / 1e9:.1f} GB of free space, and DashInfer needs {needed / 1e9:.0f} GB."
            " Free some space, or set --cache-dir to a folder on another disk."
        )


def _run(command: list[str]) -> None:
    """Run a command whose output is shown to the user."""
    try:
        subprocess.run(command, check=True, umask=UMASK)  # noqa: S603 - our own commands, the operator's paths
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetupError(
            f"`{' '.join(command[:6])} ...` failed: {error}. Fix the error above, and run the command again."
        ) from error


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()  # noqa: S603 - as above
    except (OSError, subprocess.SubprocessError):
        return ""
