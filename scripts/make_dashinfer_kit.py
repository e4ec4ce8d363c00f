"""Make DashInfer's environment for one GPU, in pieces for a machine without a network.

The environment has a CPython 3.10 that runs in any folder, DashInfer, numpy, and NVIDIA's cudart, cublas and cublasLt,
in the versions of DashInfer's requirements.txt. Of what the extension links but does not use on one GPU, it has stub
libraries. It has no torch: conversion works without it. README.txt in the folder says how to install it.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dashinfer_vlm_core.errors import SetupError
from dashinfer_vlm_dashinfer.environment import CHUNK_BYTES, VERSION, sha256
from dashinfer_vlm_dashinfer.install import NAME, PIP_OPTIONS, find_python, is_suitable, requirements
from dashinfer_vlm_dashinfer.kit import PIECE, SUMS
from dashinfer_vlm_dashinfer.stub_libraries import ONE_GPU, compile_stub_libraries

PACKAGES = frozenset({"dashinfer", "numpy", "nvidia-cublas-cu12", "nvidia-cuda-runtime-cu12"})
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_24_x86_64", "manylinux_2_28_x86_64")
PIECE_MIB = 58
COMPRESSION = 1
"""Most of the content is compressed already, or machine code: more effort saves little."""

LIBPYTHON = f"lib{NAME}.so.1.0"
SYSTEM = re.compile(r"linux-vdso|ld-linux|lib(c|m|dl|rt|util|pthread)\.so|libpython3\.10")
"""Libraries of the C library, which every machine has, and CPython itself."""
BUNDLED = ("libffi.so.8", "libz.so.1")
"""Libraries that the kit has, for `ctypes` and `zlib`. Modules that need others are left out, such as `ssl`."""
LEFT_OUT = ("site-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "config-*",
            "__pycache__", "*.a")  # fmt: skip

_LOCATIONS = """\
import json, sys, sysconfig
print(json.dumps({"prefix": sys.base_prefix, "libraries": sysconfig.get_config_var("LIBDIR")}))"""
README = """\
DashInfer {version} for one NVIDIA GPU on x86_64 Linux with glibc {glibc} or newer and a driver for CUDA 12:
{size:.0f} MiB in {count} pieces.

Copy this folder to the machine, and run there, in an environment with dashinfer-vlm-adapters:

    dashinfer-vlm dashinfer install --kit {folder}
    dashinfer-vlm verify > report.md

It needs 1.5 GB in the user's cache folder (`--cache-dir`).
"""


class KitFailed(Exception):
    """The kit cannot be made; the message says why."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new or empty folder")
    parser.add_argument("--python", type=Path, metavar="PATH", help="a CPython 3.10 with a shared library to copy")
    parser.add_argument("--piece-mib", type=int, default=PIECE_MIB, metavar="MIB", help=f"(default: {PIECE_MIB})")
    options = parser.parse_args()
    if options.piece_mib < 1:
        parser.error("--piece-mib: at least 1")
    try:
        pieces = make(options.folder, options.python or find_python(print), options.piece_mib << 20)
    except (KitFailed, SetupError) as failure:
        print(f"FAILED: {failure}", file=sys.stderr)
        return 1
    print(f"{options.folder}: {len(pieces)} pieces; {options.folder / 'README.txt'} says how to install them.")
    return 0


def make(folder: Path, python: Path, piece_bytes: int) -> list[Path]:
    """Fill the folder, and return the pieces.

    Raises:
        KitFailed: the folder is not empty, a download failed, or `python` cannot be copied.
        SetupError: there is no C compiler.
    """
    if folder.exists() and any(folder.iterdir()):
        raise KitFailed(f"{folder} is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dashinfer-kit-", dir=folder) as name:
        environment = Path(name) / "env"
        copy_python(python, environment)
        site_packages = environment / "lib" / NAME / "site-packages"
        install_packages(site_packages)
        compile_stub_libraries(ONE_GPU, site_packages / "nvidia" / "stubs" / "lib")
        output(str(environment / "bin" / "python"), "-I", "-B", "-c", "import ctypes, json, numpy")  # it is complete
        glibc = newest_glibc(environment)
        pieces = write_pieces(environment, folder, piece_bytes)
    sums = "".join(f"{sha256(piece)}  {piece.name}\n" for piece in pieces)
    (folder / SUMS).write_text(sums, encoding="ascii")
    size = sum(piece.stat().st_size for piece in pieces) / 2**20
    text = README.format(version=VERSION, glibc=glibc, size=size, count=len(pieces), folder=folder.name)
    (folder / "README.txt").write_text(text, encoding="utf-8")
    return pieces


def copy_python(python: Path, environment: Path) -> None:
    """Copy a CPython with its standard library, so that it runs in any folder.

    Raises:
        KitFailed: it is not a CPython 3.10, or has no shared library, which DashInfer's extension links.
    """
    if not is_suitable(python):
        raise KitFailed(f"{python} is not a CPython 3.10: specify one by --python")
    found = json.loads(output(str(python), "-I", "-c", _LOCATIONS))
    prefix, libraries = Path(found["prefix"]), Path(found["libraries"])
    if not (libraries / LIBPYTHON).is_file():
        raise KitFailed(f"{python} has no {LIBPYTHON}: specify a CPython 3.10 built with `--enable-shared` by --python")
    (environment / "bin").mkdir(parents=True)
    shutil.copy2(prefix / "bin" / NAME, environment / "bin" / NAME)
    (environment / "bin" / "python").symlink_to(NAME)
    standard = environment / "lib" / NAME
    shutil.copytree(prefix / "lib" / NAME, standard, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    shutil.copy2(libraries / LIBPYTHON, environment / "lib" / LIBPYTHON)
    for module in sorted((standard / "lib-dynload").glob("*.so")):
        bundle_libraries(module, environment / "lib")
    for file in (environment / "bin" / NAME, environment / "lib" / LIBPYTHON, *standard.glob("lib-dynload/*.so")):
        make_relocatable(file, str(libraries), environment / "lib")


def bundle_libraries(module: Path, folder: Path) -> None:
    """Copy the libraries that an extension module needs, or remove it if it needs others than `BUNDLED`."""
    needed = dict(re.findall(r"^\s*(\S+\.so\S*)(?: => (\S+))?", output("ldd", str(module)), re.MULTILINE))
    others = {name: path for name, path in needed.items() if not SYSTEM.search(name)}
    if not others.keys() <= set(BUNDLED):
        module.unlink()
        return
    for name, path in others.items():
        shutil.copy2(path, folder / name)


def make_relocatable(file: Path, old: str, libraries: Path) -> None:
    """Replace the absolute search path of an ELF file by one that is relative to the file.

    It is replaced in place by a shorter string, so that no offset in the file changes.
    """
    new = f"$ORIGIN/{os.path.relpath(libraries, file.parent)}"
    content, before, after = file.read_bytes(), old.encode() + b"\0", new.encode() + b"\0"
    if before not in content:
        return  # it needs no library of this folder
    if len(after) > len(before):
        raise KitFailed(f"{old} is too short to be replaced in {file.name}: specify another CPython 3.10 by --python")
    file.write_bytes(content.replace(before, after.ljust(len(before), b"\0")))


def install_packages(site_packages: Path) -> None:
    """Download and unpack the wheels, without what only compiling needs."""
    platforms = [option for tag in PLATFORMS for option in ("--platform", tag)]
    tags = ["--implementation", "cp", "--python-version", "3.10", *platforms]
    options = ["--quiet", "--no-compile", *tags, "--target", str(site_packages)]
    output(sys.executable, "-m", "pip", "install", *options, *PIP_OPTIONS, text=requirements(PACKAGES))
    for folder in site_packages.glob("nvidia/*/include"):
        shutil.rmtree(folder)


def newest_glibc(environment: Path) -> str:
    """Return the version of the C library that the interpreter and its modules need."""
    files = [environment / "bin" / NAME, *environment.glob("lib/*.so*"), *environment.glob("lib/*/lib-dynload/*.so")]
    found = {int(minor) for file in files for minor in re.findall(rb"GLIBC_2\.(\d+)\0", file.read_bytes())}
    return f"2.{max(found, default=17)}"


def write_pieces(environment: Path, folder: Path, piece_bytes: int) -> list[Path]:
    """Write a compressed archive of a folder in pieces of at most `piece_bytes` bytes, and return them in order."""
    with (
        _Pieces(folder, piece_bytes) as pieces,
        gzip.GzipFile(fileobj=pieces, mode="wb", compresslevel=COMPRESSION, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w|", bufsize=CHUNK_BYTES) as archive,
    ):
        for path in sorted_paths(environment):
            archive.add(path, path.relative_to(environment.parent), recursive=False, filter=_anonymous)
    return pieces.paths


def sorted_paths(folder: Path) -> Iterator[Path]:
    """Yield a folder and everything in it, folders first."""
    yield folder
    yield from sorted(folder.rglob("*"))


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove what depends on who makes the kit. Only the owner may write to code."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode &= 0o755
    return member


class _Pieces(io.RawIOBase):
    """Writes one file in pieces.

    Attributes:
        paths: the pieces, in order.
    """

    def __init__(self, folder: Path, piece_bytes: int) -> None:
        self.paths: list[Path] = []
        self._folder = folder
        self._piece_bytes = piece_bytes
        self._file: io.BufferedWriter | None = None
        self._free = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        while view:
            if self._file is None or not self._free:
                self._file, self._free = self._next(), self._piece_bytes
            count = min(len(view), self._free)
            self._file.write(view[:count])
            self._free -= count
            view = view[count:]
        return memoryview(data).nbytes

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()

    def _next(self) -> io.BufferedWriter:
        if self._file is not None:
            self._file.close()
        self.paths.append(self._folder / PIECE.format(len(self.paths)))
        return self.paths[-1].open("wb")


def output(*command: str, text: str | None = None) -> str:
    """Run a command with `text` as its standard input, and return what it prints.

    Raises:
        KitFailed: it failed.
    """
    done = subprocess.run(command, check=False, capture_output=True, text=True, input=text)
    if done.returncode:
        raise KitFailed(f"`{' '.join(command[:5])} ...` failed:\n{done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
