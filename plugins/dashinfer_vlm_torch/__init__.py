"""The language decoder in plain PyTorch. It runs on any device that torch supports, and is the reference for other
decoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dashinfer_vlm_core.decoders import Decoder, DecoderFactory, DecoderSupport
from dashinfer_vlm_core.hooks import hookimpl

from .settings import SUPPORTED_PARAMS, TorchOptions

if TYPE_CHECKING:
    from dashinfer_vlm_core.config import EngineConfig, PluginOptions
    from dashinfer_vlm_core.kernels.choice import KernelSelector
    from dashinfer_vlm_core.models.spec import ModelSpec


class TorchDecoderFactory:
    """The factory of the decoder `torch`. Decoders for a specific device type are expected to return a higher score."""

    name = "torch"
    supported_params: frozenset[str] = SUPPORTED_PARAMS

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
    register(TorchOptions)
