"""Kernels for tests that do not start an engine, and the conditions under which the C kernels are tested."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.kernels.choice import KernelSelector
from dashinfer_vlm_core.kernels.devices import cpu_flags
from dashinfer_vlm_core.kernels.types import Kernels
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_cpu.build import (
    AMX,
    AVX2,
    AVX512,
    AVX512_VNNI,
    LIBRARY,
    PORTABLE_TILES,
    VARIANTS,
    Variant,
    build,
    find_compiler,
)
from dashinfer_vlm_cpu.native import NativeKernels, load_variant

PORTABLE_LIBRARY = Path(__file__).parents[1] / ".cache" / "libportable.so"
"""The library with `PORTABLE_TILES`, which the package does not contain."""


def selector(config: EngineConfig) -> KernelSelector:
    return KernelSelector(load_plugins().kernels.values(), config)


def choose_kernels(device: str, dtype: torch.dtype, config: EngineConfig) -> Kernels:
    return selector(config).choose(device, dtype)


def skip_reason(variant: Variant) -> str:
    """Return why the kernels of a variant cannot be tested here; empty if they can.

    Nothing is compiled for the answer: kernels that a compiler fails to build fail their tests.
    """
    if missing := [name for name in variant.features if name not in cpu_flags()]:
        return f"this CPU has no {' and no '.join(missing)}"
    return "" if LIBRARY.is_file() or find_compiler() else "no C compiler is installed"


def needs(variant: Variant) -> pytest.MarkDecorator:
    reason = skip_reason(variant)
    return pytest.mark.skipif(bool(reason), reason=reason or "available")


needs_native, needs_avx512, needs_amx = needs(AVX2), needs(AVX512), needs(AMX)

VARIANT_PARAMS = [
    pytest.param(AVX512, id="avx512", marks=needs_avx512),
    pytest.param(PORTABLE_TILES, id="portable_tiles", marks=needs_avx512),
    pytest.param(AMX, id="amx", marks=needs_amx),
    pytest.param(AVX2, id="avx2", marks=needs_native),
]
QUANTIZED_PARAMS = [*VARIANT_PARAMS, pytest.param(AVX512_VNNI, id="avx512_vnni", marks=needs(AVX512_VNNI))]
"""With the variant whose kernels differ from those of AVX2 with 8 and 4 bits only."""


def load_kernels(variant: Variant) -> NativeKernels:
    """Load the kernels of a variant in a test that `needs` it. The test fails with the reason if that fails."""
    loaded = load_variant(variant, _portable_library() if variant is PORTABLE_TILES else LIBRARY)
    if "does not permit" in loaded.reason:  # the processor has AMX, but a container may not use it
        pytest.skip(loaded.reason)
    assert isinstance(loaded.kernels, NativeKernels), loaded.explanation
    return loaded.kernels


@functools.cache
def _portable_library() -> Path:
    PORTABLE_LIBRARY.parent.mkdir(exist_ok=True)
    with FileLock(PORTABLE_LIBRARY.with_suffix(".lock")):  # one process compiles it, which takes most of a minute
        build(PORTABLE_LIBRARY, [PORTABLE_TILES])
    return PORTABLE_LIBRARY


def load_fastest() -> NativeKernels:
    """Load the fastest kernels of this machine in a test that has `needs_native`."""
    return load_kernels(next(variant for variant in VARIANTS if cpu_flags().issuperset(variant.features)))
