"""Makes DashInfer's own environment: a CPython 3.10, pinned wheels, and where asked stand-ins for the GPU driver."""

from __future__ import annotations

import dataclasses
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from ..config import EngineConfig
from ..errors import MissingDependency, SetupError
from .environment import (
    MARKER,
    PYTHON,
    Findings,
    examine,
    find_environment,
    locked,
    private_environment,
    private_folder,
    write_json,
)

Tell = Callable[[str], None]

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
NEEDED_BYTES = 12 * 10**9
"""The wheels (3 GB) and what they unpack to (6.2 GB), with room to spare."""

NAME = f"python{PYTHON[0]}.{PYTHON[1]}"
_SUITS = (
    "import sys, venv, ensurepip; "
    f"sys.exit(sys.implementation.name != 'cpython' or sys.version_info[:2] != {PYTHON} or sys.maxsize < 2**32)"
)

# What the engine calls of the driver's management library at start-up. Each call fails, as without a GPU.
_NVML = (
    "nvmlInit_v2",
    "nvmlShutdown",
    "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetUtilizationRates",
)
STUBS = {
    "libcuda.so.1": "int dashinfer_vlm_stub;\n",
    "libnvidia-ml.so.1": "".join(f"int {name}(void) {{ return 9; }}\n" for name in _NVML)
    + 'const char *nvmlErrorString(int code) { return "no GPU driver"; }\n',
}


def install(config: EngineConfig, *, python: Path | None, cpu: bool, tell: Tell) -> Findings:
    """Make the private environment, unless there is one that works; what it says about itself.

    Args:
        config: says where.
        python: the CPython 3.10 to build on; looked for if None.
        cpu: whether to make stand-ins for the GPU driver's libraries, without which the engine does not load.
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
        if cpu:
            make_stubs(folder / "stubs", tell)
        if (findings := _working(config)) is not None:
            tell(f"DashInfer {findings.version} is installed already.")
            return findings
        _build(folder, python or find_python(tell), tell)
        return _finish(folder)


def _working(config: EngineConfig) -> Findings | None:
    """What the environment that would be used says about itself; None if there is none, or none that loads."""
    try:
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
    """
    if all((folder / name).exists() for name in STUBS):
        return
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise MissingDependency("`--cpu` compiles two small C files, and there is no C compiler: install gcc.")
    tell("Compiling stand-ins for the GPU driver's libraries.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in STUBS.items():
        command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{name}", "-x", "c", "-", "-o", str(folder / name)]
        _run(command, text=source)


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


def _build(folder: Path, python: Path, tell: Tell) -> None:
    if not suits(python):
        raise MissingDependency(f"{python} is no CPython {PYTHON[0]}.{PYTHON[1]} with venv; name another by --python.")
    _check_space(folder)
    (folder / MARKER).unlink(missing_ok=True)
    tell(f"Making an environment in {folder} with {python}.")
    _run([str(python), "-I", "-m", "venv", "--clear", str(folder / "env")])
    tell("Installing DashInfer and what it links: 3 GB to download, 6 GB on disk.")
    pip = [str(private_environment(folder).python), "-m", "pip", "--disable-pip-version-check", "install"]
    _run([*pip, "--no-deps", "--requirement", str(REQUIREMENTS)])


def _finish(folder: Path) -> Findings:
    """Try what was installed, and only then say that it is there."""
    findings = examine(private_environment(folder))
    if findings.problem:
        hint = " On a machine without a GPU driver, add `--cpu`." if "libcuda" in findings.problem else ""
        raise SetupError(f"DashInfer was installed, but does not load: {findings.problem}.{hint}")
    write_json(folder / MARKER, dataclasses.asdict(findings))
    return findings


def _check_space(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise SetupError(
            f"{folder} has {free / 1e9:.1f} GB left, and DashInfer needs {NEEDED_BYTES / 1e9:.0f}."
            " Free some, or choose another disk by --cache-dir."
        )


def _run(command: list[str], *, text: str | None = None) -> None:
    """A step whose output the person sees."""
    try:
        subprocess.run(command, input=text, text=True, check=True)  # noqa: S603 - commands are ours, paths the operator's
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetupError(
            f"`{' '.join(command[:6])} ...` failed: {error}. Mend what it says above, and run it again."
        ) from error


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()  # noqa: S603 - as above
    except (OSError, subprocess.SubprocessError):
        return ""
