"""Locate and examine DashInfer's environment."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.config.folders import CACHE_FIX, access_problem, cache_problem
from dashinfer_vlm_core.errors import ConfigError, MissingDependency, SetupError

from . import worker
from .settings import DashInferOptions

VERSION = "2.1.0"
PYTHON = (3, 10)

PROGRAM = Path(worker.__file__)
MARKER = "environment.json"
CHECK_SECONDS = 120
CHUNK_BYTES = 1 << 20
"""Files are read in chunks of this size."""

UMASK = 0o022
"""Of the programs that write the environment: it is executed, so only its owner may write to it."""

Report = Callable[[str], None]

PASSED_VARIABLES = (
    *("PATH", "HOME", "LANG", "LC_", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "MALLOC_", "OPENBLAS_", "PYTORCH_"),
    *("CUDA_", "NVIDIA_", "NCCL_", "OMP_", "OMPI_", "GOMP_", "KMP_", "MKL_", "MPI_", "DNNL_", "ONEDNN_"),
    *("ALLSPARK_", "AS_", "BFC_", "CPU_", "HIE_", "GLOG_", "GOOGLE_LOG", "GOOGLE_ALSOLOGTOSTDERR"),
)
"""Beginnings of the names of environment variables that DashInfer's process inherits: those of the system, of its
libraries and its own. Others can contain keys."""


def inherited_variables() -> dict[str, str]:
    """Return the environment variables of a process that runs DashInfer."""
    return {name: value for name, value in os.environ.items() if name.startswith(PASSED_VARIABLES)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """An interpreter with DashInfer.

    Attributes:
        python: the interpreter.
        origin: how it was selected; shown publicly, so it contains no path.
        folder: the folder of the private environment; None for an interpreter that the user installed.
    """

    python: Path
    origin: str
    folder: Path | None = None

    @property
    def stubs(self) -> Path:
        """The folder for stub libraries, of the GPU driver's libraries or of all."""
        return self.python.parent.parent / worker.STUBS

    @property
    def cpu_only(self) -> bool:
        """Whether it was installed for the CPU only, without CUDA."""
        return (self.stubs / worker.CUDA_LIBRARIES[0]).exists()

    def command(self, program: Path, *arguments: str) -> list[str]:
        """The command that runs `program` under this interpreter, isolated from PYTHONPATH and the user site."""
        return [str(self.python), "-I", str(program), *arguments]


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """The result of examining an environment.

    Attributes:
        python: its version.
        version: DashInfer's; empty if it cannot be loaded.
        problem: why it cannot be loaded; empty if it can.
    """

    python: str = ""
    version: str = ""
    problem: str = ""


def private_folder(config: EngineConfig) -> Path:
    return config.cache_folder / f"dashinfer-{VERSION}-cp{PYTHON[0]}{PYTHON[1]}"


def private_environment(folder: Path) -> Environment:
    """The environment in `folder`, whether it exists or not."""
    return Environment(python=folder / "env" / "bin" / "python", origin="in its own environment", folder=folder)


def find_environment(config: EngineConfig) -> Environment:
    """Find the environment to use: the configured one, else this one if it has DashInfer, else the private one.

    This only checks that it exists; `examine` loads DashInfer.

    Raises:
        ConfigError: the configured one does not exist.
        MissingDependency: there is none; the message contains the next step.
        SetupError: other users can change it.
    """
    python = config.options_of(DashInferOptions).dashinfer_python
    if python is not None:
        if not python.is_file():
            raise ConfigError(
                f"`dashinfer_python` {python} is not a file. Set it to a Python interpreter that has DashInfer.",
                param="dashinfer_python",
            )
        return Environment(python=python, origin="in the environment that dashinfer_python names")
    if sys.version_info[:2] == PYTHON and importlib.util.find_spec("dashinfer") is not None:
        return Environment(python=Path(sys.executable), origin="in this interpreter")
    folder = private_folder(config)
    private = private_environment(folder)
    if not ((folder / MARKER).is_file() and private.python.exists()):
        raise MissingDependency(
            "DashInfer is not installed. Run `dashinfer-vlm dashinfer install` (with `--cpu` on a machine without a GPU"
            " driver)."
        )
    if problem := folder_problem(folder):
        raise SetupError(problem)
    return private


def folder_problem(folder: Path) -> str:
    """Return why the code in `folder` is not executed, with the next step; empty if only this user and root can
    write to the folder and everything in it.

    A folder that other users cannot enter protects its content, whose modes are then not examined.
    """
    try:
        status = folder.stat()
        problem = access_problem(status)
        if not problem and status.st_mode & (stat.S_IXGRP | stat.S_IXOTH):
            problem = next(filter(None, map(access_problem, _statuses(folder))), "")
    except OSError as error:
        problem = f"it cannot be examined ({error.strerror})"
    if not problem:
        return ""
    return (  # shown publicly, so it contains no path
        f"The folder {folder.name} of the cache, or a file in it, is not executed: {problem}. Delete the folder and run"
        " `dashinfer-vlm dashinfer install` again. If you trust everyone who could write there, `chmod -R go-w` of the"
        " folder is enough."
    )


def _statuses(folder: Path) -> Iterator[os.stat_result]:
    # The mode of a symbolic link has no meaning.
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_symlink():
                yield entry.stat(follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False):
                yield from _statuses(Path(entry.path))


def examine(environment: Environment) -> Findings:
    """Load DashInfer in the environment, which takes a second."""
    try:
        done = subprocess.run(  # noqa: S603 - the operator selects the interpreter; the program is our own
            environment.command(PROGRAM, "check"),
            capture_output=True,
            text=True,
            timeout=CHECK_SECONDS,
            env=inherited_variables(),
            check=False,
        )
        return Findings(**json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.TimeoutExpired) as error:
        return Findings(problem=str(error))
    except (IndexError, ValueError, TypeError):
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return Findings(problem=last[0])


def disk_bytes(folder: Path) -> int:
    """Disk space of the files under `folder` in bytes, without holes in files."""
    stats = (path.lstat() for path in folder.rglob("*"))
    return 512 * sum({stat.st_ino: stat.st_blocks for stat in stats}.values())


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock the file `path` against other threads and processes, which wait.

    Raises:
        SetupError: its folder cannot be created or written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("w")
    except OSError as error:
        raise SetupError(cache_problem(path.parent, error.strerror or str(error))) from error
    with opened as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sha256(path: Path) -> str:
    """Return the hexadecimal digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def check_space(folder: Path, needed: int, purpose: str) -> None:
    """Check that the disk has enough free space.

    Raises:
        SetupError: fewer than `needed` bytes are free in `folder`.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise SetupError(
            f"{purpose} needs {needed / 1e9:.1f} GB in {folder}, where {free / 1e9:.1f} GB are free. {CACHE_FIX}"
        )


def run_command(command: Sequence[str], text: str | None = None) -> None:
    """Run a command whose output is shown to the user, with `text` as its standard input.

    Raises:
        SetupError: it cannot be run, or failed.
    """
    try:
        subprocess.run(command, check=True, umask=UMASK, input=text, text=True)  # noqa: S603 - our own commands, the operator's paths
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetupError(
            f"`{' '.join(command[:6])} ...` failed ({error}). Fix the error above, and run the command again."
        ) from error
