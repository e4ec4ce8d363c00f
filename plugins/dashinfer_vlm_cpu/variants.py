"""The variants of the C kernels, one for each instruction set, and how they are compiled.

`scripts/build_wheel.py` runs this module by its path, without the dependencies of the package: it imports only the
standard library.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

COMPILE_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fopenmp")
LINK_FLAGS = ("-shared", "-Wl,-Bsymbolic-functions")


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
"""Fastest first. The wheel for Linux on x86-64 contains these; see prebuilt.py."""


def source_digest(folder: Path) -> str:
    """Return a digest of the C files in a folder and of how `VARIANTS` are compiled from them."""
    digest = hashlib.sha256(repr((VARIANTS, COMPILE_FLAGS)).encode())
    for path in sorted([*folder.glob("*.c"), *folder.glob("*.h")]):
        digest.update(f"\0{path.name}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
