"""C source -> shared library, compiled on first use and kept in the user's cache."""

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

OTHER_CACHE = "choose another one by `cache_dir` (DASHINFER_VLM_CACHE_DIR)"

PATIENCE = 120.0
"""Seconds that a compiler may take; it takes ten."""


class BuildError(Exception):
    """The library could not be made.

    Attributes:
        reason: why.
        remedy: what helps.
    """

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(f"{reason}; {fix}")
        self.reason = reason
        self.fix = fix


def build(source: Path, cache: Path, name: str = "", flags: Sequence[str] = ()) -> Path:
    """The compiled library of `source`, from `cache` if it was made before.

    Args:
        source: a C file; it may include the headers in its folder.
        cache: folder of the libraries.
        name: of the library; that of the source by default.
        flags: of the compiler, in addition to `FLAGS`.

    Raises:
        BuildError: no compiler can do it, or the cache cannot be written or is open to others.
    """
    compilers = list(filter(None, map(shutil.which, COMPILERS)))
    if not compilers:
        raise BuildError(
            "no C compiler was found", "install gcc or clang, by `apt-get install gcc` or `dnf install gcc`"
        )
    flags = [*FLAGS, *flags, *map(str, _openmp_of_torch())]
    texts = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    key = hashlib.sha256("\0".join([*texts, *compilers, *flags]).encode()).hexdigest()[:16]
    library = cache / f"{name or source.stem}-{key}.so"
    _own_folder(cache)
    if not library.exists():
        _compile_by_any(compilers, source, flags, library)
    return library


def _own_folder(folder: Path) -> None:
    """What lies there is run: nobody else may have put it there."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
    except OSError as error:
        raise BuildError(f"the cache {folder} cannot be made: {error.strerror}", OTHER_CACHE) from error
    if found.st_uid != os.geteuid():
        raise BuildError(f"the cache {folder} belongs to another user", OTHER_CACHE)
    if found.st_mode & 0o022:
        raise BuildError(f"other users can write to the cache {folder}", f"run `chmod go-w {folder}`, or {OTHER_CACHE}")


def _compile_by_any(compilers: Sequence[str], source: Path, flags: Sequence[str], library: Path) -> None:
    """By the first compiler that can: an old one may stand before a newer one."""
    for compiler in compilers[:-1]:
        with contextlib.suppress(BuildError):
            return _compile(compiler, source, flags, library)
    return _compile(compilers[-1], source, flags, library)


def _openmp_of_torch() -> list[Path]:
    """torch's own OpenMP library, where it brings one: two in a process would fight for the cores."""
    root = Path(torch.__file__).parent
    return sorted([*root.glob("lib/libgomp*.so*"), *root.parent.glob("torch.libs/libgomp*.so*")])[:1]


def _compile(compiler: str, source: Path, flags: Sequence[str], library: Path) -> None:
    """Written beside and moved, so that processes that compile at the same time do not meet."""
    try:
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder, library.name)
            _run([compiler, str(source), *flags, "-o", str(made)])
            made.replace(library)
    except OSError as error:
        raise BuildError(f"the cache {library.parent} cannot be written: {error.strerror}", OTHER_CACHE) from error


def _run(command: Sequence[str]) -> None:
    compiler = command[0]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=PATIENCE)  # noqa: S603 our own command
    except subprocess.CalledProcessError as error:
        if os.strerror(errno.ENOSPC) in error.stderr:
            raise BuildError(
                "the disk of the cache or of temporary files is full", f"free some MB, or {OTHER_CACHE}"
            ) from error
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise BuildError(f"{compiler} failed ({last})", "gcc 11 and clang 14 can do it") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler} took more than {PATIENCE:g} s", "try again when the machine is idle") from error
    except OSError as error:
        raise BuildError(f"{compiler} does not run: {error.strerror}", "install gcc 11 or clang 14") from error
