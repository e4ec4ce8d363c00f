"""Compile C source into a shared library on first use, and load it from the user's cache folder."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from .library_cache import CheckedLibrary, FolderError, LibraryCache, RejectedLibraryError
from .variants import COMPILE_FLAGS, LINK_FLAGS

COMPILERS = ("cc", "gcc", "clang")

OTHER_CACHE = "choose another folder with `cache_dir` (DASHINFER_VLM_CACHE_DIR)"

COMPILE_TIMEOUT = 120.0
"""Time limit of the compiler in seconds; it usually takes ten."""

VERSION_TIMEOUT = 20.0
"""Time limit of a compiler's `--version` in seconds."""


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


def load_library(source: Path, cache: Path, name: str = "", flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Load the compiled library of `source`, from `cache` if it was compiled before.

    Concurrent callers, in this process and others, wait for the one that compiles this library.

    Args:
        source: a C file; it may include the headers in its folder.
        cache: the folder of the libraries.
        name: name of the library; that of the source by default.
        flags: compiler flags, in addition to `COMPILE_FLAGS` and `LINK_FLAGS`.

    Raises:
        BuildError: no compiler can build it, or the cache is not writable or is writable by other users.
        OSError: the dynamic loader rejects the library.
    """
    compilers = list(filter(None, map(shutil.which, COMPILERS)))
    if not compilers:
        raise BuildError(
            "no C compiler was found", "install gcc or clang, with `apt-get install gcc` or `dnf install gcc`"
        )
    flags, openmp = [*COMPILE_FLAGS, *LINK_FLAGS, *flags], _torch_openmp()
    stem = f"{name or source.stem}-{_build_key(source, compilers, flags, openmp)}"
    with _open_cache(cache) as libraries:
        library = libraries.find(stem)
        if library is None:
            with libraries.locked(stem):
                libraries.remove_rejected(stem)
                library = libraries.find(stem) or _compile_and_store(
                    libraries, stem, cache, lambda: _compile_with_any(compilers, source, [*flags, *map(str, openmp)])
                )
    return library.load()


@contextlib.contextmanager
def _open_cache(folder: Path) -> Iterator[LibraryCache]:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise BuildError(f"the cache {folder} cannot be created: {error.strerror}", OTHER_CACHE) from error
    with contextlib.ExitStack() as stack:
        try:
            libraries = stack.enter_context(LibraryCache.open(folder))
        except OSError as error:
            raise BuildError(f"the cache {folder} cannot be opened: {error.strerror}", OTHER_CACHE) from error
        except FolderError as error:
            fix = f"run `chmod go-w {folder}`, or {OTHER_CACHE}" if "write" in error.reason else OTHER_CACHE
            raise BuildError(f"the cache {folder} is not used: {error.reason}", fix) from error
        yield libraries


def _compile_and_store(
    libraries: LibraryCache, stem: str, folder: Path, compile_library: Callable[[], bytes]
) -> CheckedLibrary:
    try:
        libraries.check_writable()  # compiling takes ten seconds
        return libraries.store(stem, compile_library())
    except OSError as error:
        raise BuildError(f"the cache {folder} cannot be written: {error.strerror}", OTHER_CACHE) from error
    except RejectedLibraryError as error:
        raise BuildError(f"a file written to the cache {folder} is not usable: {error}", OTHER_CACHE) from error


def _build_key(source: Path, compilers: Sequence[str], flags: Sequence[str], openmp: Sequence[Path]) -> str:
    """Return a digest of everything that the compiled library depends on.

    The folders of the compiler, of the source and of torch's OpenMP library are not part of it, so that environments
    share a library. The library refers to OpenMP by its soname, and torch has loaded that before.
    """
    files = [source, *sorted(source.parent.glob("*.h")), *openmp]
    parts = [
        platform.machine(),
        _libc_version(),
        *flags,
        *map(_compiler_identity, compilers),
        *(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _libc_version() -> str:
    """Return the C library's version: a library linked with a newer one may not load with an older one."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):  # not glibc
        return ""


def _compiler_identity(compiler: str) -> str:
    """Return the text of `--version`, or the path if it has none."""
    try:
        done = subprocess.run(  # noqa: S603 our own command
            [compiler, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VERSION_TIMEOUT,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return compiler
    return done.stdout


def _compile_with_any(compilers: Sequence[str], source: Path, flags: Sequence[str]) -> bytes:
    """Compile with the first compiler that succeeds: an old one may precede a newer one."""
    for compiler in compilers[:-1]:
        with contextlib.suppress(BuildError):
            return _compile(compiler, source, flags)
    return _compile(compilers[-1], source, flags)


def _torch_openmp() -> list[Path]:
    """Return torch's bundled OpenMP library, if any: two OpenMP runtimes in a process would compete for the cores."""
    root = Path(torch.__file__).parent
    return sorted([*root.glob("lib/libgomp*.so*"), *root.parent.glob("torch.libs/libgomp*.so*")])[:1]


def _compile(compiler: str, source: Path, flags: Sequence[str]) -> bytes:
    """Return the compiled library. It is compiled in a private temporary folder, whose path nobody can exchange."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder, "library.so")
            _run([compiler, str(source), *flags, "-o", str(output)])
            return output.read_bytes()
    except OSError as error:
        raise BuildError(
            f"the folder for temporary files cannot be used: {error.strerror}", "set TMPDIR to a folder on another disk"
        ) from error


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
