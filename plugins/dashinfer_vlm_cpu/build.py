"""Compile the C kernels for all instruction sets into one library, next to their sources.

`scripts/build_hook.py` calls this when the package is installed or a wheel is built. After a C file of an editable
installation has changed, `scripts/env` or `python -m dashinfer_vlm_cpu` compiles the library again. This module
is run by its path in an environment without the package, so it imports only the standard library.

Each variant is a separate object file, whose functions get the variant's name as a prefix. Linked together, they need
no library but the C library, and run no code when they are loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
LIBRARY = FOLDER / "libkernels.so"

COMPILE_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fopenmp")
COMMON_FLAGS = ("-O2", "-std=gnu11", "-fPIC", "-march=x86-64")
LINK_FLAGS = (
    "-shared",
    "-nostartfiles",  # they would run code of the compiler's libraries on loading
    "-Wl,-Bsymbolic-functions",
    "-Wl,-z,defs",  # report functions that no library defines
    "-Wl,-z,noexecstack",
    "-Wl,-z,relro,-z,now",
    "-Wl,--as-needed",
    "-Wl,--build-id=none",
    "-s",
    "-lm",
)


class Variant(NamedTuple):
    """C kernels for one instruction set.

    Attributes:
        name: name of the kernel set, and the value of `cpu_kernels` that selects it.
        source: the C file.
        flags: compiler flags, in addition to `COMPILE_FLAGS`.
        features: required CPU features, as /proc/cpuinfo spells them.
    """

    name: str
    source: str
    flags: tuple[str, ...]
    features: tuple[str, ...]


AVX512 = Variant(
    "avx512",
    "avx512.c",
    ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni", "-mfma"),
    ("avx512_bf16", "avx512_vnni"),
)
AMX = Variant(
    "amx",
    "avx512.c",
    (*AVX512.flags, "-DTILES", "-DTILES_AMX", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    (*AVX512.features, "amx_tile", "amx_bf16", "amx_int8"),
)
PORTABLE_TILES = Variant("portable_tiles", "avx512.c", (*AVX512.flags, "-DTILES"), AVX512.features)
"""The kernels of `AMX` with its instructions emulated in C, bit-exact and slow: for tests on every machine."""

AVX2 = Variant("avx2", "avx2.c", ("-mavx2", "-mfma", "-mf16c"), ("avx2", "fma", "f16c"))
AVX_VNNI = Variant("avx_vnni", "avx2.c", (*AVX2.flags, "-mavxvnni"), (*AVX2.features, "avx_vnni"))
AVX512_VNNI = Variant(
    "avx512_vnni", "avx2.c", (*AVX2.flags, "-mavx512vl", "-mavx512vnni"), (*AVX2.features, "avx512vl", "avx512_vnni")
)
"""The kernels of `AVX_VNNI` with the same instructions in the encoding of AVX-512, for CPUs without AVX-512 BF16."""

VARIANTS = (AMX, AVX512, AVX512_VNNI, AVX_VNNI, AVX2)
"""The variants of the library, fastest first."""


ADVICE = (
    "The C kernels need gcc 11 or newer and binutils. Set CC to such a gcc, or HATCH_BUILD_NO_HOOKS=true to install the"
    " package without them."
)


class BuildError(Exception):
    """A tool failed; the message has its command and its output."""


def build(output: Path = LIBRARY, variants: Sequence[Variant] = VARIANTS) -> bool:
    """Compile a library, unless it is current.

    Returns:
        Whether there is a current library. There is none without a compiler, or for other platforms.

    Raises:
        BuildError: the compilation failed.
        OSError: the folder of the library cannot be written.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    if is_current(output):
        return True
    compiler = find_compiler()
    if not compiler:
        return False
    with tempfile.TemporaryDirectory(prefix=".build-", dir=output.parent) as folder:
        _compile(compiler, Path(folder), variants).replace(output)
    return True


def find_compiler() -> list[str]:
    """Return the command of the C compiler, `$CC` or gcc; empty if there is none.

    Other compilers than gcc are not searched for: clang's code calls functions of its own OpenMP library.
    """
    return shlex.split(os.environ.get("CC", "")) or ["gcc"] * (shutil.which("gcc") is not None)


def is_current(library: Path) -> bool:
    """Whether a library exists and was compiled from the present sources."""
    return library.is_file() and source_digest().encode() in library.read_bytes()


def source_digest() -> str:
    """Return a digest of the C files, and of this module, which has the compiler's flags."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted([*FOLDER.glob("*.c"), *FOLDER.glob("*.h")]):
        digest.update(f"\0{path.name}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _compile(compiler: Sequence[str], folder: Path, variants: Sequence[Variant]) -> Path:
    digest = source_digest()  # first: sources may be edited during the compilation
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = list(pool.map(lambda variant: _compile_variant(compiler, folder, variant), variants))
    common = _compile_common(compiler, folder, parts, digest)
    exports = folder / "exports"
    prefixes = ["common", *(variant.name for variant in variants)]
    exports.write_text(f"{{ global: {' '.join(f'{prefix}_*;' for prefix in prefixes)} local: *; }};\n")
    library = folder / LIBRARY.name
    _run([*compiler, str(common), *map(str, parts), *LINK_FLAGS, f"-Wl,--version-script={exports}", "-o", str(library)])
    return library


def _compile_variant(compiler: Sequence[str], folder: Path, variant: Variant) -> Path:
    """Compile a variant to an object file, in which the variant's name is a prefix of each function."""
    path = folder / f"{variant.name}.o"
    _run([*compiler, variant.source, *COMPILE_FLAGS, *variant.flags, "-c", "-o", str(path)])
    names = folder / f"{variant.name}.names"
    names.write_text("".join(f"{name} {variant.name}_{name}\n" for name in _symbols(path, "--defined-only")))
    _run(["objcopy", f"--redefine-syms={names}", str(path)])
    return path


def _compile_common(compiler: Sequence[str], folder: Path, parts: Sequence[Path], digest: str) -> Path:
    called = {name for path in parts for name in _symbols(path, "--undefined-only")}
    openmp = sorted(name for name in called if name.startswith(("GOMP_", "omp_")))
    defines = [
        f"-DOPENMP_FUNCTIONS={' '.join(f'FUNCTION({name})' for name in openmp)}",
        f'-DSOURCE_DIGEST="{digest}"',
    ]
    path = folder / "common.o"
    _run([*compiler, "common.c", *COMMON_FLAGS, *defines, "-c", "-o", str(path)])
    return path


def _symbols(path: Path, which: str) -> list[str]:
    return [line.split()[0] for line in _run(["nm", "--extern-only", "-P", which, str(path)]).splitlines()]


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, errors="replace", check=False)  # noqa: S603 - our own
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error.strerror}. {ADVICE}") from error
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stdout}{done.stderr}{ADVICE}")
    return done.stdout


def main() -> int:
    try:
        has_library = build()
    except (BuildError, OSError) as error:
        print(f"The C kernels could not be compiled. {error}", file=sys.stderr)  # noqa: T201
        return 1
    if not has_library:
        print("The C kernels are not compiled: they need gcc, on Linux on x86-64.", file=sys.stderr)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
