"""The engine of a LangChain model: in this process, given by the caller, or a server."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.engine import Engine
from dashinfer_vlm_core.engine.manager import ManagedEngine
from dashinfer_vlm_core.engine.remote import RemoteEngine
from dashinfer_vlm_core.engine.shared import SHARED, GetEngine, SharedEngines, call_engine
from dashinfer_vlm_core.models.pooling import Task
from dashinfer_vlm_core.protocol.validation_errors import invalid

if TYPE_CHECKING:
    from typing_extensions import Self

    from dashinfer_vlm_core.engine import ChatEngine

T = TypeVar("T")


class EngineConnection(BaseModel):
    """The fields of all LangChain models that say which engine serves them.

    By default the model runs in this process. It is loaded at the first request, once per configuration, and shared by
    all models, threads and event loops. With `base_url`, requests are sent to a server instead; with `engine`, to an
    engine that the caller has started.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(
        populate_by_name=True, extra="forbid", arbitrary_types_allowed=True, protected_namespaces=()
    )
    _task: ClassVar[Task | None] = None
    """What a model in this process is used for; as its files say by default."""

    model: str = Field(default="demo", alias="model_name")
    """A registered name (`demo` is bundled), a checkpoint folder, or a Hugging Face model ID; for a server, the model's
    name there."""
    timeout: float | None = Field(default=None, alias="request_timeout", gt=0)
    """Timeout in seconds for the complete response, also of a stream. It includes loading the model."""
    max_retries: int = Field(default=0, ge=0)
    """Number of retries after transient errors. A stream is retried only before its first chunk."""

    base_url: str | None = None
    """The base URL of a server, including `/v1`."""
    api_key: SecretStr | None = None
    """The server's API key. An engine in this process needs none."""
    engine_options: dict[str, Any] = Field(default_factory=dict, repr=False)
    """EngineConfig fields of an engine in this process."""
    engine: Any = Field(default=None, exclude=True, repr=False)
    """A `ChatEngine` to use."""
    engines: SharedEngines = Field(default_factory=lambda: SHARED, exclude=True, repr=False)
    """The registry of engines. By default, all adapters of this process share one."""

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        if self.engine is not None and (self.base_url or self.engine_options):
            raise invalid("engine", "cannot be combined with `base_url` or `engine_options`.")
        if self.base_url and self.engine_options:
            raise invalid(
                "engine_options", "configure an engine in this process, and cannot be combined with `base_url`."
            )
        if self.base_url:
            self.engines.remote(self.base_url, api_key=self._key)  # validates the URL
        elif self.engine is None:
            self._config(self.model)
        return self

    @property
    def model_name(self) -> str:
        return self.model

    @property
    def _is_remote(self) -> bool:
        return bool(self.base_url) or isinstance(self.engine, RemoteEngine)

    @property
    def _engine_id(self) -> str:
        """What identifies the engine in a cache's key, which traces show."""
        if isinstance(self.engine, RemoteEngine):
            return self.engine.api_base
        if self.base_url:
            return self.base_url
        if self.engine is None:  # options may contain passwords
            options = json.dumps(self.engine_options, sort_keys=True, default=str)
            return hashlib.sha256(options.encode()).hexdigest()
        # Of all models: a request names one of them, and the first one is the default.
        return str([str(each.config) for each in self.engine.models() if isinstance(each, Engine | ManagedEngine)])

    @property
    def _key(self) -> str | None:
        return self.api_key.get_secret_value() if self.api_key else None

    def _engine(self, model: str | None = None) -> tuple[dict[str, str], GetEngine]:
        name = model or self.model
        if self.engine is not None and model is None and "model" not in self.model_fields_set:
            return {}, self._connected_engine  # it knows its model
        if self.engine is not None or self.base_url:
            return {"model": name}, self._connected_engine
        config = self._config(name)
        return {"model": config.request_name(name)}, lambda: self.engines.aget(config)

    async def _connected_engine(self) -> ChatEngine:
        if self.base_url:
            return self.engines.remote(self.base_url, api_key=self._key)
        return self.engine  # type: ignore[no-any-return]  # pydantic cannot check a protocol

    def _config(self, model: str) -> EngineConfig:
        task = {"task": self._task} if self._task else {}
        return self.engines.config(model, task | self.engine_options)

    async def _call_engine(self, work: Callable[[ChatEngine, dict[str, str]], Awaitable[T]]) -> T:
        name, engine = self._engine()
        return await call_engine(
            engine, lambda started: work(started, name), timeout=self.timeout, max_retries=self.max_retries
        )

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Copy the model. The copy uses the same engines."""
        memo = {} if memo is None else memo
        for shared in (self.engine, self.engines):
            memo[id(shared)] = shared
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[Any, Any]:
        """Return the state for pickle. An engine of the other process is loaded there on first use.

        Raises:
            TypeError: `engine` or `engines` is set.
        """
        if self.engine is not None or self.engines is not SHARED:
            raise TypeError(
                "A model with `engine` or `engines` cannot be pickled. Use `engine_options` or `base_url` instead."
            )
        state = super().__getstate__()
        return {**state, "__dict__": {key: item for key, item in state["__dict__"].items() if key != "engines"}}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        super().__setstate__({**state, "__dict__": {**state["__dict__"], "engines": SHARED}})
