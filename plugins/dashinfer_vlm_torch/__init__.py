"""The language decoder in plain PyTorch. It runs on any device that torch supports, and is the reference for other
decoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dashinfer_vlm_core.decoders import (
    GUIDED_DECODING,
    LORA,
    SAMPLING_PARAMETERS,
    Decoder,
    DecoderFactory,
    DecoderSupport,
)
from dashinfer_vlm_core.hooks import hookimpl

if TYPE_CHECKING:
    from dashinfer_vlm_core.config import EngineConfig, PluginOptions
    from dashinfer_vlm_core.kernels.choice import KernelSelector
    from dashinfer_vlm_core.models.spec import ModelSpec


class TorchDecoderFactory:
    """The factory of the decoder `torch`. Decoders for a specific device type are expected to return a higher score."""

    name = "torch"
    supported_params: frozenset[str] = SAMPLING_PARAMETERS | {GUIDED_DECODING, LORA}

    def check_support(self, spec: ModelSpec, config: EngineConfig) -> DecoderSupport:
        return DecoderSupport(score=10, reason=f"PyTorch runs on any device; `device` is {config.device!r}.")

    def create(self, spec: ModelSpec, config: EngineConfig, kernels: KernelSelector) -> Decoder:
        from .decoder import TorchDecoder

        return TorchDecoder(spec, config, kernels)


@hookimpl
def register_decoders(register: Callable[[DecoderFactory], None]) -> None:
    register(TorchDecoderFactory())


@hookimpl
def register_options(register: Callable[[type[PluginOptions]], None]) -> None:
    from .settings import TorchOptions

    register(TorchOptions)
