"""DashInfer's own environment: where it is, and what is in it."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config import EngineConfig
from ...errors import MissingDependency, SetupError
from ...kernels.devices import cuda_devices
from . import worker
from .settings import DashInferOptions

VERSION = "2.1.0"
PYTHON = (3, 10)

PROGRAM = Path(worker.__file__)
MARKER = "environment.json"
CHECK_SECONDS = 120

_INSTALL = "Run `dashinfer-vlm dashinfer install` (with `--cpu` on a machine without a GPU driver)."


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """An interpreter that has DashInfer.

    Attributes:
        python: the interpreter.
        origin: how it came to be used; it is shown to everybody, and holds no path.
        stubs: folder of stand-ins for the GPU driver's libraries, where they were made.
        cpu_only: whether it was installed for the CPU only, with stand-ins for all of CUDA's libraries.
        folder: what was installed for it; None for an interpreter that the user installed.
    """

    python: Path
    origin: str
    stubs: Path | None
    cpu_only: bool = False
    folder: Path | None = None

    def command(self, program: Path, *arguments: str) -> list[str]:
        """`program` under this interpreter, which sees nothing of ours: no PYTHONPATH, no user site."""
        return [str(self.python), "-I", str(program), *arguments]


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What an environment says about itself.

    Attributes:
        python: its version.
        cuda: number of CUDA devices that it sees.
        version: the engine's; empty if it cannot be loaded.
        problem: why not; empty if it can.
        cpu_only: whether it was installed for the CPU only.
    """

    python: str = ""
    cuda: int = 0
    version: str = ""
    problem: str = ""
    cpu_only: bool = False


def private_folder(config: EngineConfig) -> Path:
    return config.cache_folder / f"dashinfer-{VERSION}-cp{PYTHON[0]}{PYTHON[1]}"


def private_environment(folder: Path) -> Environment:
    """The environment in `folder`, whether it is there or not."""
    python = folder / "env" / "bin" / "python"
    return Environment(
        python=python,
        origin="in its own environment",
        stubs=_stubs(folder),
        cpu_only=stand_ins_folder(python).is_dir(),
        folder=folder,
    )


def stand_ins_folder(python: Path) -> Path:
    """The folder of stand-ins whose existence marks the environment of `python` as one for the CPU only."""
    return python.parent.parent / worker.CPU_ONLY


def _stubs(folder: Path) -> Path | None:
    return folder / "stubs" if (folder / "stubs").is_dir() else None


def find_environment(config: EngineConfig) -> Environment:
    """The environment to use: the one that is configured, else this one if it has DashInfer, else the private one.

    Only looks whether it is there: `examine` tries it.

    Raises:
        MissingDependency: there is none; the message says how to install it.
    """
    folder = private_folder(config)
    stubs = _stubs(folder)
    python = config.options_of(DashInferOptions).dashinfer_python
    if python is not None:
        if not python.is_file():
            raise MissingDependency(f"`dashinfer_python` {python} is no file.", param="dashinfer_python")
        return Environment(
            python=python,
            origin="in the environment that dashinfer_python names",
            stubs=stubs,
            cpu_only=stand_ins_folder(python).is_dir(),
        )
    if sys.version_info[:2] == PYTHON and importlib.util.find_spec("dashinfer") is not None:
        return Environment(python=Path(sys.executable), origin="in this interpreter", stubs=stubs)
    private = private_environment(folder)
    if (folder / MARKER).is_file() and private.python.exists():
        return private
    raise MissingDependency(f"DashInfer is not installed. {_INSTALL}")


def examine(environment: Environment) -> Findings:
    """Load the engine in the environment: takes a second."""
    stubs = [str(environment.stubs)] if environment.stubs else []
    try:
        done = subprocess.run(  # noqa: S603 - the interpreter is the operator's choice, the program is ours
            environment.command(PROGRAM, "check", *stubs),
            capture_output=True,
            text=True,
            timeout=CHECK_SECONDS,
            check=False,
        )
        found = json.loads(done.stdout.splitlines()[-1])
        return Findings(**found, cuda=0 if found["cpu_only"] else cuda_devices())
    except (OSError, subprocess.TimeoutExpired) as error:
        return Findings(problem=str(error))
    except (IndexError, ValueError, TypeError):
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return Findings(problem=last[0])


def disk_bytes(folder: Path) -> int:
    """Bytes of disk that the files under `folder` take: what is allocated, so that holes in files do not count."""
    found = (path.lstat() for path in folder.rglob("*"))
    return 512 * sum({stat.st_ino: stat.st_blocks for stat in found}.values())


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold the lock file `path` against other threads and processes; yields whether it had to wait.

    Raises:
        SetupError: its folder cannot be made or written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("w")
    except OSError as error:
        raise SetupError(
            f"The cache folder {path.parent} cannot be written to ({error.strerror or error}): make it writable, or"
            " choose another by cache_dir."
        ) from error
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            waited = False
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_EX)
            waited = True
        yield waited


def write_json(path: Path, values: dict[str, Any]) -> None:
    """All of it or nothing, whatever happens meanwhile."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
