"""Load the compiled C kernels from `libkernels.so`, see build.py.

The library is part of the package, and therefore trusted like the package's Python code.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import torch

from .build import Variant, is_current

COMPILE = "run `python -m dashinfer_vlm_cpu`"


class LibraryError(Exception):
    """The library cannot be used.

    Attributes:
        reason: what is wrong.
        fix: the next step.
    """

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(f"{reason}; {fix}")
        self.reason = reason
        self.fix = fix


class _VariantLibrary(ctypes.CDLL):
    """The functions of one variant, by their names in its C file."""

    def __init__(self, path: Path, variant: Variant) -> None:
        super().__init__(str(path))
        self._prefix = variant.name

    def __getitem__(self, name: Any) -> Any:
        return super().__getitem__(f"{self._prefix}_{name}")


def load_library(variant: Variant, path: Path) -> ctypes.CDLL:
    """Load the functions of a variant from a library.

    Raises:
        LibraryError: there is no library, it was compiled from other sources, or it cannot run in this process.
    """
    if not path.is_file():
        raise LibraryError(
            "the package was installed without a C compiler", f"install gcc (11 or newer), and {COMPILE}"
        )
    if not is_current(path):
        raise LibraryError("the C kernels were compiled from other sources", COMPILE)
    try:
        library = _VariantLibrary(path, variant)
    except OSError as error:
        raise LibraryError(
            f"the compiled kernels cannot be loaded ({error})", f"delete {path}, and {COMPILE}"
        ) from error
    _connect_openmp(ctypes.CDLL(str(path)))
    return library


def _connect_openmp(library: ctypes.CDLL) -> None:
    """Have the library use the OpenMP functions that torch uses.

    A second OpenMP runtime would have its own threads, which would compete with torch's for the cores. The dynamic
    loader searches the libraries that torch's extension module depends on, wherever they are installed.
    """
    library.common_openmp_functions.restype = ctypes.c_char_p
    names = library.common_openmp_functions().decode().split()
    torch_libraries = ctypes.CDLL(sys.modules["torch._C"].__file__)
    try:
        addresses = [ctypes.cast(getattr(torch_libraries, name), ctypes.c_void_p).value for name in names]
    except AttributeError as error:
        reason = f"torch {torch.__version__} has no OpenMP function that the C kernels use ({error})"
        raise LibraryError(reason, "install a build of torch from PyPI or download.pytorch.org") from error
    library.common_set_openmp_functions((ctypes.c_void_p * len(names))(*addresses))
