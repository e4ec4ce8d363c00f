"""Resolve the device, the dtype and the quantization of a model, including `auto`."""

from __future__ import annotations

import torch

from ..config import EngineConfig
from ..errors import ConfigError
from ..kernels.choice import KernelSelector
from ..kernels.devices import is_cpu
from ..kernels.types import Kernels
from .memory import MemoryEstimate, ModelSize, estimate_memory, memory_limit, weight_bytes
from .spec import ModelSpec
from .weights import torch_dtype


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


def resolve_dtype(dtype: str, stored: str, device: str, *, quantized: bool = False) -> str:
    """Resolve `EngineConfig.dtype` for weights stored as `stored`; `device` is already resolved.

    `auto` is the stored dtype, except for float16 on a CPU, which computes it slowly. It becomes float32, since
    bfloat16 would drop three of its bits, and in a `quantized` checkpoint bfloat16: the kernels for weights with 4 and
    8 bits require it, and these weights have larger errors. An explicit dtype is used as is.
    """
    if dtype != "auto":
        return dtype
    if stored == "float16" and torch.device(device).type == "cpu":
        return "bfloat16" if quantized else "float32"
    return stored


def resolve_placement(config: EngineConfig, spec: ModelSpec) -> tuple[str, torch.dtype]:
    """Return the device and the dtype with which `config` runs a checkpoint.

    Raises:
        ConfigError: the device cannot be used here.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, spec.dtype, device, quantized=spec.quantization is not None)
    return device, torch_dtype(dtype)


def quantizes_vision_encoder(config: EngineConfig, kernels: Kernels) -> bool:
    """Whether `config` quantizes the weights of the vision encoder to int8; `kernels` are those that run it.

    `auto` follows `quantization`, unless these kernels do not support int8: with DashInfer on CUDA, for example,
    `quantization` concerns only the text model.

    Raises:
        ConfigError: `vision_quantization` is int8, and `kernels` do not support it.
    """
    if config.vision_quantization == "auto":
        return config.resolved_vision_quantization == "int8" and kernels.supports_int8
    if config.vision_quantization == "int8" and not kernels.supports_int8:
        raise ConfigError(
            f"`vision_quantization` int8 is not supported by the kernels {kernels.name!r}, which run the vision encoder"
            " here: it requires bfloat16 and the C kernels, on an x86 CPU with AVX2. Remove it.",
            param="vision_quantization",
        )
    return config.vision_quantization == "int8"


def estimate_model(size: ModelSize, config: EngineConfig, kernels: KernelSelector) -> MemoryEstimate:
    """Estimate what a model needs on this machine, with the kernels that an engine would use.

    Raises:
        ConfigError: the device, or `vision_quantization`, cannot be used here.
    """
    device = resolve_device(config.device)
    dtype = torch_dtype(resolve_dtype(config.dtype, size.dtype, device, quantized=size.stored_bits is not None))
    text_kernels = kernels.find(device, dtype, size.text).kernels
    weights = weight_bytes(
        size,
        config,
        text_kernels,
        itemsize=dtype.itemsize,
        int8_vision=quantizes_vision_encoder(config, kernels.find(device, dtype).kernels),
    )
    memory = memory_limit() if is_cpu(device) else None
    return estimate_memory(size, config, weights, kernels=text_kernels, memory=memory)
