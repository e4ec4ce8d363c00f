"""The fastest kernels that can run here."""

from __future__ import annotations

import logging

import torch

from ..config import EngineConfig
from ..errors import ConfigError
from .native import load_native
from .plain import Plain
from .types import Kernels

logger = logging.getLogger(__name__)


def choose_kernels(device: str, dtype: torch.dtype, config: EngineConfig) -> Kernels:
    """The fastest kernels for models on `device` in `dtype`, both resolved.

    Why those in C are not taken where they could have been is logged.

    Raises:
        ConfigError: `cpu_kernels` names a set that cannot run here.
    """
    if torch.device(device).type != "cpu" or dtype != torch.bfloat16 or config.cpu_kernels == "torch":
        return Plain(device)
    kernels, reason = load_native(config)
    if kernels is None and config.cpu_kernels != "auto":
        fault = f"`cpu_kernels` {config.cpu_kernels!r} cannot be used: {reason}. Leave it out, or take `torch`."
        raise ConfigError(fault, param="cpu_kernels")
    if kernels is None:
        logger.warning("PyTorch's kernels are used, which are slower than those in C: %s.", reason)
    return kernels or Plain(device)
