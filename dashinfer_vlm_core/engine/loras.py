"""The LoRA adapters of an engine: which are loaded, and which one a request uses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..config import EngineConfig
from ..decoders import LORA
from ..errors import InvalidParameter, ModelNotFound, QueueFull, UnsupportedParameter
from ..models.lora import LoraWeights, read_lora
from ..protocol import DEFAULT_MODEL, ChatRequest
from ..vision import VisionLora

if TYPE_CHECKING:
    from ..decoders.supervisor import Supervisor
    from ..models.interface import VisionEncoder
    from ..models.spec import ModelSpec

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraStatus:
    """A LoRA adapter that requests can use.

    Attributes:
        name: its name in requests.
        source: the name of its folder, or its Hugging Face ID.
    """

    name: str
    source: str


@dataclass(kw_only=True, slots=True, eq=False)
class ActiveLora:
    """A loaded adapter.

    Attributes:
        weights: its weights.
        vision: the vision encoder with its changes; None if it does not change the vision encoder.
        path: the path that it was loaded from.
        permanent: whether it stays loaded while no request uses it.
        num_requests: number of running requests that use it.
    """

    weights: LoraWeights
    vision: VisionLora | None
    path: str
    permanent: bool = False
    num_requests: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class LoraManager:
    """Loads the adapters of `EngineConfig.lora` at startup, and those of `LoRARequest` on first use.

    At most `limits.max_loras` adapters are loaded, or those of `EngineConfig.lora` if they are more. For another
    one, the least recently used one is unloaded that no request uses and that `EngineConfig.lora` does not list.
    Belongs to one event loop.

    Attributes:
        config: lists the adapters, and limits their number.
        spec: the model.
        decoder: applies the adapters.
        load_encoder: loads the vision encoder with an adapter's changes.
    """

    config: EngineConfig
    spec: ModelSpec
    decoder: Supervisor
    load_encoder: Callable[[LoraWeights], VisionEncoder]
    _loaded: dict[str, ActiveLora] = field(default_factory=dict)  # least recently used first
    _loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def load_all(self) -> None:
        """Load the adapters of the configuration.

        Raises:
            CheckpointError: an adapter cannot be loaded.
        """
        for module in self.config.lora:
            (await self._load(module.name, module.path)).permanent = True

    @property
    def statuses(self) -> tuple[LoraStatus, ...]:
        """The adapters that requests can name, by name."""
        return tuple(
            LoraStatus(name=loaded.weights.name, source=loaded.weights.source)
            for loaded in sorted(self._loaded.values(), key=lambda loaded: loaded.weights.name)
            if loaded.permanent
        )

    @contextlib.asynccontextmanager
    async def use(self, request: ChatRequest) -> AsyncIterator[ActiveLora | None]:
        """Keep the adapter of a request loaded in this context; None for requests to the model itself.

        Raises:
            ModelNotFound: the request names neither the model nor an adapter.
            UnsupportedParameter: the decoder does not support adapters.
            InvalidParameter: the request names an adapter like the model, or one that was loaded from another path, or
                one that is not loaded without a path.
            CheckpointError: the adapter cannot be loaded.
            QueueFull: all loaded adapters are in use, and another one would exceed the limit.
        """
        given = request.requested_lora
        if given is None:
            active = self._find(request.model)
        else:
            self._check_name(given.lora_name)
            active = await self._load(given.lora_name, given.lora_path)
        if active is None:
            yield None
            return
        active.num_requests += 1
        try:
            yield active
        finally:
            active.num_requests -= 1

    def _check_name(self, name: str) -> None:
        if LORA not in self.decoder.supported_params:
            raise UnsupportedParameter(
                f"The decoder {self.decoder.name!r} does not support LoRA adapters. Remove `lora_request`, or select"
                " another decoder.",
                param="lora_request",
            )
        if self.spec.rotated:
            raise InvalidParameter(
                f"The hidden states of {self.config.name} are rotated, but the adapter {name!r} changes those of the"
                " original. Use a checkpoint that was quantized without `--rotate`.",
                param="lora_request",
            )
        if self._is_model(name):
            raise InvalidParameter(f"`lora_name` {name!r} is the model's name.", param="lora_request")

    def _is_model(self, name: str) -> bool:
        return name in (self.config.name, self.config.model, DEFAULT_MODEL)

    def _find(self, name: str) -> ActiveLora | None:
        if self._is_model(name):
            return None
        active = self._loaded.get(name)
        if active is None or not active.permanent:
            raise ModelNotFound.among([self.config.name, *(status.name for status in self.statuses)], name)
        return active

    async def _load(self, name: str, path: str) -> ActiveLora:
        if name not in self._loaded:
            async with self._loading:
                if name not in self._loaded:  # it was not loaded in the meantime
                    self._loaded[name] = await self._read(name, path)
        active = self._loaded[name]  # until `use` counts the request, nothing else runs
        if path not in {"", active.path}:
            raise InvalidParameter(
                f"The LoRA adapter {name!r} was loaded from {active.path!r}. Use another `lora_name` for {path!r}.",
                param="lora_request",
            )
        self._loaded[name] = self._loaded.pop(name)
        return active

    def _find_idle(self) -> str | None:
        """Return the adapter to unload for another one; None if none needs to be."""
        limit = max(self.config.limits.max_loras, len(self.config.lora))
        if len(self._loaded) < limit:
            return None
        idle = (name for name, active in self._loaded.items() if not active.num_requests and not active.permanent)
        if (name := next(idle, None)) is None:
            raise QueueFull(
                f"{limit} LoRA adapters are loaded and in use. Try again later, or increase `limits.max_loras`."
            )
        return name

    async def _read(self, name: str, path: str) -> ActiveLora:
        if not path:
            raise InvalidParameter(f"No LoRA adapter {name!r} is loaded. Set `lora_path`.", param="lora_request")
        self._find_idle()  # rejects the request before a download
        lora = await asyncio.to_thread(read_lora, name, path, self.spec)
        if (idle := self._find_idle()) is not None:
            logger.info("LoRA adapter %r is unloaded.", idle)
            del self._loaded[idle]
        vision = None
        if lora.changes_vision:
            logger.info("LoRA adapter %r changes the vision encoder: it needs the memory of another one.", name)
            encoder = await asyncio.to_thread(self.load_encoder, lora)
            vision = VisionLora(key=lora.digest, encoder=encoder)
        await self.decoder.load_lora(lora)
        return ActiveLora(weights=lora, vision=vision, path=path)
