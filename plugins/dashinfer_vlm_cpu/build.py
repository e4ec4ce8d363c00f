"""Compile C source into a shared library on first use and cache it in the user's cache folder."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

FLAGS = (
    "-O3", "-std=gnu11", "-shared", "-fPIC", "-fopenmp", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq",
    "-mavx512bf16", "-mavx512vnni", "-mfma", "-Wl,-Bsymbolic-functions",
)  # fmt: skip

COMPILERS = ("cc", "gcc", "clang")

OTHER_CACHE = "choose another folder with `cache_dir` (DASHINFER_VLM_CACHE_DIR)"

COMPILE_TIMEOUT = 120.0
"""Time limit of the compiler in seconds; it usually takes ten."""


class BuildError(Exception):
    """The library could not be built.

    Attributes:
        reason: what failed.
        fix: the next step.
    """

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(f"{reason}; {fix}")
        self.reason = reason
        self.fix = fix


def build(source: Path, cache: Path, name: str = "", flags: Sequence[str] = ()) -> Path:
    """Return the compiled library of `source`, from `cache` if it was built before.

    Args:
        source: a C file; it may include the headers in its folder.
        cache: the folder of the libraries.
        name: name of the library; that of the source by default.
        flags: compiler flags, in addition to `FLAGS`.

    Raises:
        BuildError: no compiler can build it, or the cache is not writable or is writable by other users.
    """
    compilers = list(filter(None, map(shutil.which, COMPILERS)))
    if not compilers:
        raise BuildError(
            "no C compiler was found", "install gcc or clang, with `apt-get install gcc` or `dnf install gcc`"
        )
    flags = [*FLAGS, *flags, *map(str, _torch_openmp())]
    texts = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    key = hashlib.sha256("\0".join([*texts, *compilers, *flags]).encode()).hexdigest()[:16]
    library = cache / f"{name or source.stem}-{key}.so"
    _create_private_folder(cache)
    if not library.exists():
        _compile_with_any(compilers, source, flags, library)
    return library


def _create_private_folder(folder: Path) -> None:
    """Create the cache folder and check that only this user can write to it: its contents are executed."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError as error:
        raise BuildError(f"the cache {folder} cannot be created: {error.strerror}", OTHER_CACHE) from error
    if status.st_uid != os.geteuid():
        raise BuildError(f"the cache {folder} belongs to another user", OTHER_CACHE)
    if status.st_mode & 0o022:
        raise BuildError(f"other users can write to the cache {folder}", f"run `chmod go-w {folder}`, or {OTHER_CACHE}")


def _compile_with_any(compilers: Sequence[str], source: Path, flags: Sequence[str], library: Path) -> None:
    """Compile with the first compiler that succeeds: an old one may precede a newer one."""
    for compiler in compilers[:-1]:
        with contextlib.suppress(BuildError):
            return _compile(compiler, source, flags, library)
    return _compile(compilers[-1], source, flags, library)


def _torch_openmp() -> list[Path]:
    """Return torch's bundled OpenMP library, if any: two OpenMP runtimes in a process would compete for the cores."""
    root = Path(torch.__file__).parent
    return sorted([*root.glob("lib/libgomp*.so*"), *root.parent.glob("torch.libs/libgomp*.so*")])[:1]


def _compile(compiler: str, source: Path, flags: Sequence[str], library: Path) -> None:
    """Compile to a temporary file and rename it, so that concurrent processes do not conflict."""
    try:
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            output = Path(folder, library.name)
            _run([compiler, str(source), *flags, "-o", str(output)])
            output.replace(library)
    except OSError as error:
        raise BuildError(f"the cache {library.parent} cannot be written: {error.strerror}", OTHER_CACHE) from error


def _run(command: Sequence[str]) -> None:
    compiler = command[0]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=COMPILE_TIMEOUT)  # noqa: S603 our own command
    except subprocess.CalledProcessError as error:
        if os.strerror(errno.ENOSPC) in error.stderr:
            raise BuildError(
                "the disk of the cache or of temporary files is full", f"free a few MB, or {OTHER_CACHE}"
            ) from error
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise BuildError(f"{compiler} failed ({last})", "use gcc 11 or clang 14, or newer") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(
            f"{compiler} took more than {COMPILE_TIMEOUT:g} s", "try again when the machine is idle"
        ) from error
    except OSError as error:
        raise BuildError(f"{compiler} cannot be run: {error.strerror}", "install gcc 11 or clang 14") from error
