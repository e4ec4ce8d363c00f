"""Decoder plugins that were written for version 0.1, until 0.3."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from ..deprecation import warn_renamed

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..decoders import DecodeRequest, DecoderSupport, Token
    from ..kernels import KernelSelector
    from ..models.spec import ModelSpec


def current_decoder_factory(factory: Any) -> Any:
    """Return the factory itself, or one that adapts a factory with the names of version 0.1."""
    return factory if hasattr(factory, "check_support") or not hasattr(factory, "fitness") else _Factory(factory)


class _Factory:
    """A `DecoderFactory` over one that has `fitness`, and perhaps `honours`."""

    def __init__(self, factory: Any) -> None:
        warn_renamed("DecoderFactory.fitness", "DecoderFactory.check_support", stacklevel=2)
        self._factory = factory
        self.name: str = factory.name
        self.supported_params: frozenset[str] = getattr(factory, "honours", frozenset())

    def check_support(self, spec: ModelSpec, config: EngineConfig) -> DecoderSupport:
        support: DecoderSupport = self._factory.fitness(spec, config)
        return support

    def create(self, spec: ModelSpec, config: EngineConfig, kernels: KernelSelector) -> Any:
        arguments = [spec, config, kernels][: len(inspect.signature(self._factory.create).parameters)]
        decoder = self._factory.create(*arguments)
        return decoder if hasattr(decoder, "supported_params") else _Decoder(decoder)


class _Decoder:
    """A `Decoder` over one that has `honours`, `blind` and `trouble`."""

    def __init__(self, decoder: Any) -> None:
        warn_renamed("Decoder.honours", "Decoder.supported_params", stacklevel=2)
        warn_renamed("Decoder.blind", "Decoder.unsupported_vision_reason", stacklevel=2)
        warn_renamed("Decoder.trouble", "Decoder.fatal_error", stacklevel=2)
        self._decoder = decoder
        self.name: str = decoder.name
        if hasattr(decoder, "snapshot"):
            self.snapshot = decoder.snapshot

    @property
    def max_model_len(self) -> int:
        length: int = self._decoder.max_model_len
        return length

    @property
    def supported_params(self) -> frozenset[str]:
        names: frozenset[str] = self._decoder.honours
        return names

    @property
    def unsupported_vision_reason(self) -> str:
        reason: str = self._decoder.blind
        return reason

    @property
    def fatal_error(self) -> str:
        error: str = self._decoder.trouble
        return error

    async def start(self) -> None:
        await self._decoder.start()

    async def close(self) -> None:
        await self._decoder.close()

    def decode(self, request: DecodeRequest) -> AsyncGenerator[Token, None]:
        tokens: AsyncGenerator[Token, None] = self._decoder.decode(request)
        return tokens
