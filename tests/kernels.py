"""The kernels registered by plugins, for tests that do not start an engine."""

from __future__ import annotations

import torch

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.kernels import Kernels, KernelSelector
from dashinfer_vlm_core.plugins import load_plugins


def selector(config: EngineConfig) -> KernelSelector:
    return KernelSelector(load_plugins().kernels.values(), config)


def choose_kernels(device: str, dtype: torch.dtype, config: EngineConfig) -> Kernels:
    return selector(config).choose(device, dtype)
