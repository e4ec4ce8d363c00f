"""The library of compiled kernels that the wheel for Linux on x86-64 contains.

It has the functions of all variants, each with the variant's name as a prefix, and no OpenMP library of its own. It is
part of the package, and therefore trusted like the package's Python code.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import torch

from .variants import VARIANTS, Variant, source_digest

FOLDER = Path(__file__).parent
LIBRARY = FOLDER / "libkernels.so"


class NoPrebuiltKernelsError(Exception):
    """There is no prebuilt library; the message gives the reason."""


class UnusablePrebuiltKernelsError(NoPrebuiltKernelsError):
    """There is a prebuilt library, but it cannot be used; the message gives the reason."""


class _VariantLibrary(ctypes.CDLL):
    """The functions of one variant, by their names in its C file."""

    def __init__(self, path: Path, variant: Variant) -> None:
        super().__init__(str(path))
        self._prefix = variant.name

    def __getitem__(self, name: Any) -> Any:
        return super().__getitem__(f"{self._prefix}_{name}")


def load_prebuilt(variant: Variant, path: Path = LIBRARY) -> ctypes.CDLL:
    """Load the functions of a variant from the prebuilt library.

    Raises:
        NoPrebuiltKernelsError: this installation has no such library, or not for this variant.
        UnusablePrebuiltKernelsError: the library was compiled from other sources, or cannot run in this process.
    """
    if variant not in VARIANTS or not path.is_file():
        raise NoPrebuiltKernelsError("this installation has no prebuilt kernels")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise UnusablePrebuiltKernelsError(f"the prebuilt kernels cannot be loaded ({error})") from error
    library.prebuilt_source_digest.restype = ctypes.c_char_p
    if library.prebuilt_source_digest().decode() != source_digest(FOLDER):
        raise UnusablePrebuiltKernelsError("the prebuilt kernels were compiled from other sources")
    _connect_openmp(library)
    return _VariantLibrary(path, variant)


def _connect_openmp(library: ctypes.CDLL) -> None:
    """Have the library use the OpenMP functions that torch uses.

    A second OpenMP runtime would have its own threads, which would compete with torch's for the cores. The dynamic
    loader searches the libraries that torch's extension module depends on, wherever they are installed.
    """
    library.prebuilt_openmp_functions.restype = ctypes.c_char_p
    names = library.prebuilt_openmp_functions().decode().split()
    torch_libraries = ctypes.CDLL(sys.modules["torch._C"].__file__)
    try:
        addresses = [ctypes.cast(getattr(torch_libraries, name), ctypes.c_void_p).value for name in names]
    except AttributeError as error:
        raise UnusablePrebuiltKernelsError(
            f"torch {torch.__version__} has no OpenMP function that the prebuilt kernels use ({error})"
        ) from error
    library.prebuilt_set_openmp_functions((ctypes.c_void_p * len(names))(*addresses))
