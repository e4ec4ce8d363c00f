"""Where a model computes and in which numbers: what `auto` means."""

from __future__ import annotations

import torch

from ..errors import ConfigError


def resolve_device(device: str) -> str:
    """The device that `EngineConfig.device` means here; `auto` is CUDA where there is one, else the CPU.

    Raises:
        ConfigError: torch does not know it, or it is not in this machine.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # builds of torch without CUDA assert
        reason = str(error).splitlines()[0]
        raise ConfigError(f"`device` {device!r} cannot be used here: {reason}. Try `auto`.", param="device") from error
    return device


def resolve_dtype(dtype: str, stored: str, device: str) -> str:
    """The number type that `EngineConfig.dtype` means for weights stored as `stored` on `device`, both resolved.

    `auto` takes what is stored, but float32 for float16 weights on a CPU: CPUs compute float16 slowly, and bfloat16
    would drop three of its bits. A type that is asked for by name is taken as it is.
    """
    if dtype != "auto":
        return dtype
    return "float32" if stored == "float16" and torch.device(device).type == "cpu" else stored
