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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoraManager:
    """Loads the adapters of `EngineConfig.lora` at startup, and those of `LoRARequest` on first use.

    At most `limit` adapters are loaded. For another one, the least recently used one is unloaded that no request uses
    and that `EngineConfig.lora` does not list. Belongs to one event loop.

    Attributes:
        model: the model's name in responses.
        aliases: other names that requests may use for the model.
        spec: the model.
        decoder: applies the adapters.
        load_encoder: loads the vision encoder with an adapter's changes.
        limit: maximum number of adapters.
    """

    model: str
    aliases: frozenset[str]
    spec: ModelSpec
    decoder: Supervisor
    load_encoder: Callable[[LoraWeights], VisionEncoder]
    limit: int
    _loaded: dict[str, ActiveLora] = field(default_factory=dict)  # least recently used first
    _loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def load_all(self, config: EngineConfig) -> None:
        """Load the adapters of the configuration.

        Raises:
            CheckpointError: an adapter cannot be loaded.
        """
        for module in config.lora:
            (await self._load(module.name, module.path)).permanent = True

    @property
    def statuses(self) -> tuple[LoraStatus, ...]:
        """The adapters that requests can name, by name."""
        return tuple(
            LoraStatus(name=loaded.weights.name, source=loaded.weights.source)
            for loaded in sorted(self._loaded.values(), key=lambda loaded: loaded.weights.name)
            if loaded.permanent
        )

    def check(self, request: ChatRequest) -> None:
        """Check the model and the adapter that a request names, before any work is done.

        Raises:
            ModelNotFound: the request names neither the model nor an adapter.
            UnsupportedParameter: the decoder does not support adapters.
            InvalidParameter: the request names an adapter like the model.
        """
        given = request.requested_lora
        if given is None:
            self._find(request.model)
            return
        if LORA not in self.decoder.supported_params:
            raise UnsupportedParameter(
                f"The decoder {self.decoder.name!r} does not support LoRA adapters. Remove `lora_request`, or select"
                " another decoder.",
                param="lora_request",
            )
        if given.lora_name in self._names:
            raise InvalidParameter(f"`lora_name` {given.lora_name!r} is the model's name.", param="lora_request")

    @contextlib.asynccontextmanager
    async def use(self, request: ChatRequest) -> AsyncIterator[ActiveLora | None]:
        """Keep the adapter of a request loaded in this context; None for requests to the model itself.

        Raises:
            RequestError: as `check`; or the adapter was loaded from another path, or is not loaded and has no path.
            CheckpointError: the adapter cannot be loaded.
            QueueFull: all loaded adapters are in use, and another one would exceed the limit.
        """
        self.check(request)
        given = request.requested_lora
        active = self._find(request.model) if given is None else await self._load(given.lora_name, given.lora_path)
        if active is None:
            yield None
            return
        active.num_requests += 1
        try:
            yield active
        finally:
            active.num_requests -= 1

    @property
    def _names(self) -> frozenset[str]:
        return self.aliases | {self.model, DEFAULT_MODEL}

    def _find(self, name: str) -> ActiveLora | None:
        """Return the adapter with this name; None if it is a name of the model."""
        if name in self._names:
            return None
        active = self._loaded.get(name)
        if active is None or not active.permanent:
            known = " or ".join([repr(self.model), *(repr(status.name) for status in self.statuses)])
            raise ModelNotFound(f"The model {name!r} is not served here. Use {known}.", param="model")
        return active

    async def _load(self, name: str, path: str) -> ActiveLora:
        """Return a loaded adapter, loading it if necessary; an empty path is that of an adapter that is loaded."""
        async with self._loading:
            active = self._loaded.get(name)
            if active is None:
                if not path:
                    raise InvalidParameter(
                        f"No LoRA adapter {name!r} is loaded. Set `lora_path`.", param="lora_request"
                    )
                self._unload_idle()
                active = await self._read(name, path)
            elif path not in {"", active.path}:
                raise InvalidParameter(
                    f"The LoRA adapter {name!r} was loaded from {active.path!r}. Use another `lora_name` for {path!r}.",
                    param="lora_request",
                )
            self._loaded.pop(name, None)
            self._loaded[name] = active
            return active

    def _unload_idle(self) -> None:
        if len(self._loaded) < self.limit:
            return
        idle = (name for name, active in self._loaded.items() if not active.num_requests and not active.permanent)
        if (name := next(idle, None)) is None:
            raise QueueFull(
                f"{self.limit} LoRA adapters are loaded and in use. Try again later, or increase `limits.max_loras`."
            )
        logger.info("LoRA adapter %r is unloaded.", name)
        del self._loaded[name]

    async def _read(self, name: str, path: str) -> ActiveLora:
        lora = await asyncio.to_thread(read_lora, name, path, self.spec)
        vision = None
        if lora.changes_vision:
            encoder = await asyncio.to_thread(self.load_encoder, lora)
            vision = VisionLora(key=lora.digest, encoder=encoder)
        await self.decoder.load_lora(lora)
        return ActiveLora(weights=lora, vision=vision, path=path)
