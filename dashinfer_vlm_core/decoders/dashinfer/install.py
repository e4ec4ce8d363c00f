"""Makes DashInfer's own environment: a CPython 3.10, pinned wheels, and for the CPU stand-ins for CUDA's libraries.

There are two kinds. The full one has torch, which brings CUDA's libraries, and runs on GPUs and CPUs. The one for the
CPU only has the wheel of DashInfer and numpy: a thirtieth of the disk.
"""

from __future__ import annotations

import dataclasses
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from ...config import EngineConfig
from ...errors import MissingDependency, SetupError
from ...kernels.devices import cuda_devices
from .environment import (
    MARKER,
    PYTHON,
    Findings,
    examine,
    find_environment,
    locked,
    private_environment,
    private_folder,
    stand_ins_folder,
    write_json,
)
from .gpu_code import remove_gpu_code
from .stand_ins import ALL, DRIVER, compile_stand_ins, find_compiler

Tell = Callable[[str], None]

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
CPU_ONLY_PACKAGES = frozenset({"dashinfer", "numpy"})
"""What an environment for the CPU only gets of them."""

FULL_BYTES = 12 * 10**9
"""The wheels (3.4 GB) and what they unpack to (6.6 GB), with room to spare."""
CPU_ONLY_BYTES = 2 * 10**9
"""The wheels (0.32 GB) and what they unpack to (0.9 GB, until the GPU code is removed), with room to spare."""

EXTENSION = "env/lib/python*/site-packages/dashinfer/allspark/_allspark.cpython-*.so"

NAME = f"python{PYTHON[0]}.{PYTHON[1]}"
_SUITS = (
    "import sys, venv, ensurepip; "
    f"sys.exit(sys.implementation.name != 'cpython' or sys.version_info[:2] != {PYTHON} or sys.maxsize < 2**32)"
)


def install(config: EngineConfig, *, python: Path | None, cpu: bool, tell: Tell) -> Findings:
    """Make the private environment, unless there is one that works; what it says about itself.

    A full environment serves a CPU too, so that it is kept. One for the CPU only is kept as well, unless this machine
    has a GPU and `cpu` does not ask for it.

    Args:
        config: says where.
        python: the CPython 3.10 to build on; looked for if None.
        cpu: whether to make an environment for the CPU only.
        tell: gets a line per step.

    Raises:
        MissingDependency: there is no CPython 3.10 or no C compiler; the message says how to get one.
        SetupError: another platform, too little disk space, or the wheels could not be installed.
    """
    _check_platform()
    folder = private_folder(config)
    with locked(folder.with_suffix(".lock")) as waited:
        if waited:
            tell("Another installation has just ended.")
        findings = _working(config, cpu=cpu, tell=tell)
        if findings is not None and (cpu or not findings.cpu_only or not cuda_devices()):
            tell(f"DashInfer {findings.version} is installed already{', for the CPU only' * findings.cpu_only}.")
            return findings
        if cpu:
            return _build_cpu_only(folder, python or find_python(tell), tell)
        return _build_full(folder, python or find_python(tell), tell)


def _working(config: EngineConfig, *, cpu: bool, tell: Tell) -> Findings | None:
    """What the environment that would be used says about itself; None if there is none, or none that loads.

    One that has CUDA's libraries, and lacks only the driver's, gets stand-ins for these if `cpu` allows them.
    """
    try:
        environment = find_environment(config)
        findings = examine(environment)
        if findings.problem and cpu and findings.python and not findings.cpu_only:
            make_stubs(private_folder(config) / "stubs", tell)
            findings = examine(find_environment(config))
    except MissingDependency:
        return None
    return None if findings.problem else findings


def find_python(tell: Tell) -> Path:
    """A CPython 3.10: on PATH, of pyenv or uv, or else one that uv fetches.

    Raises:
        MissingDependency: there is none.
    """
    for candidate in _candidates():
        if suits(candidate):
            return candidate
    if uv := shutil.which("uv"):
        tell(f"Letting uv fetch {NAME}.")
        _run([uv, "python", "install", f"{PYTHON[0]}.{PYTHON[1]}"])
        for candidate in _found_by_uv(uv):
            if suits(candidate):
                return candidate
    raise MissingDependency(
        f"DashInfer's wheels are for CPython {PYTHON[0]}.{PYTHON[1]}, and there is none on PATH, under pyenv or uv."
        " Install one (`uv python install 3.10`, `pyenv install 3.10`, or your system's python3.10 and"
        " python3.10-venv), or name one by `--python PATH`."
    )


def suits(python: Path) -> bool:
    """Whether it is a CPython 3.10 that can make environments."""
    try:
        command = [str(python), "-I", "-c", _SUITS]
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0  # noqa: S603 - found in the operator's own folders
    except (OSError, subprocess.TimeoutExpired):
        return False


def make_stubs(folder: Path, tell: Tell) -> None:
    """Compile stand-ins for the GPU driver's libraries, where they are not there yet.

    Raises:
        MissingDependency: there is no C compiler.
        SetupError: it failed.
    """
    if all((folder / library.soname).exists() for library in DRIVER):
        return
    tell("Compiling stand-ins for the GPU driver's libraries.")
    compile_stand_ins(DRIVER, folder)


def _check_platform() -> None:
    found = f"{platform.system()} {platform.machine()}"
    if found != "Linux x86_64":
        raise SetupError(f"DashInfer's wheels are for Linux on x86_64, not for {found}. Use another decoder.")


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


def _build_full(folder: Path, python: Path, tell: Tell) -> Findings:
    _make_environment(folder, python, FULL_BYTES, tell)
    tell("Installing DashInfer and what it links: 3.4 GB to download, 6.6 GB on disk.")
    _pip_install(folder, _requirements())
    return _finish(folder)


def _build_cpu_only(folder: Path, python: Path, tell: Tell) -> Findings:
    find_compiler()  # before anything that exists is replaced
    _make_environment(folder, python, CPU_ONLY_BYTES, tell)
    tell("Compiling stand-ins for the libraries of CUDA and of the GPU driver.")
    compile_stand_ins(ALL, stand_ins_folder(private_environment(folder).python))
    tell("Installing DashInfer for the CPU: 0.32 GB to download.")
    _pip_install(folder, [line for line in _requirements() if line.partition("==")[0] in CPU_ONLY_PACKAGES])
    removed = sum(remove_gpu_code(path) for path in folder.glob(EXTENSION))
    if removed:
        tell(f"Removed the GPU code of DashInfer's extension: {removed / 1e6:.0f} MB of disk are free again.")
    return _finish(folder, gpu_code_removed=removed)


def _make_environment(folder: Path, python: Path, needed: int, tell: Tell) -> None:
    if not suits(python):
        raise MissingDependency(f"{python} is no CPython {PYTHON[0]}.{PYTHON[1]} with venv; name another by --python.")
    _check_space(folder, needed)
    (folder / MARKER).unlink(missing_ok=True)
    tell(f"Making an environment in {folder} with {python}.")
    _run([str(python), "-I", "-m", "venv", "--clear", str(folder / "env")])


def _requirements() -> list[str]:
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _pip_install(folder: Path, requirements: list[str]) -> None:
    pip = [str(private_environment(folder).python), "-m", "pip", "--disable-pip-version-check", "install"]
    _run([*pip, "--no-deps", *requirements])


def _finish(folder: Path, **record: int) -> Findings:
    """Try what was installed, and only then say that it is there; `record` is kept with what it says about itself."""
    findings = examine(private_environment(folder))
    if findings.problem:
        hint = " On a machine without a GPU driver, add `--cpu`." if "libcuda" in findings.problem else ""
        raise SetupError(f"DashInfer was installed, but does not load: {findings.problem}.{hint}")
    write_json(folder / MARKER, dataclasses.asdict(findings) | record)
    return findings


def _check_space(folder: Path, needed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise SetupError(
            f"{folder} has {free / 1e9:.1f} GB left, and DashInfer needs {needed / 1e9:.0f}."
            " Free some, or choose another disk by --cache-dir."
        )


def _run(command: list[str]) -> None:
    """A step whose output the person sees."""
    try:
        subprocess.run(command, check=True)  # noqa: S603 - commands are ours, paths the operator's
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetupError(
            f"`{' '.join(command[:6])} ...` failed: {error}. Mend what it says above, and run it again."
        ) from error


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()  # noqa: S603 - as above
    except (OSError, subprocess.SubprocessError):
        return ""
