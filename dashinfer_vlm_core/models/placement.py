"""Resolve the device and dtype of a model, including `auto`."""

from __future__ import annotations

import torch

from ..errors import ConfigError


def resolve_device(device: str) -> str:
    """Resolve `EngineConfig.device`; `auto` is CUDA if available, else the CPU.

    Raises:
        ConfigError: torch does not support the device, or this machine does not have it.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch builds without CUDA raise AssertionError
        reason = str(error).splitlines()[0]
        raise ConfigError(f"`device` {device!r} cannot be used here: {reason}. Try `auto`.", param="device") from error
    return device


def resolve_dtype(dtype: str, stored: str, device: str) -> str:
    """Resolve `EngineConfig.dtype` for weights stored as `stored`; `device` is already resolved.

    `auto` is the stored dtype, except that float16 weights on a CPU become float32: CPUs compute float16 slowly, and
    bfloat16 would drop three of its bits. An explicit dtype is used as is.
    """
    if dtype != "auto":
        return dtype
    return "float32" if stored == "float16" and torch.device(device).type == "cpu" else stored
