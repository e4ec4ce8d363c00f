"""ModelManager: several models in one process, loaded and unloaded as requests need them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ..config import EngineConfig
from ..errors import EngineClosed, InvalidParameter, ModelNotFound, SetupError
from ..media_workers import WorkerLimit, default_workers
from ..models.checkpoint import is_hub_id
from ..models.lora import adapter_source
from ..models.pooling import Task
from ..plugins import Registry, load_plugins
from ..protocol import ChatRequest, EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest
from ..protocol.ocr import OcrRequest
from .capabilities import Capabilities, configured_capabilities
from .engine import (
    AnyOcrRequest,
    ChatEngine,
    Engine,
    EngineStats,
    EngineStatus,
    Request,
    Startable,
    State,
    parse_scores,
)
from .loading import Shared
from .loras import LoraStatus
from .managed_models import Estimate, ManagedModel, check_memory, check_names, estimate_bytes, find_spec, names_of
from .model_loader import LOAD_FAILED, ModelLoader
from .model_rules import ModelPolicy, ModelScheduler, RuledModel
from .observers import RequestObserver

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk
    from typing_extensions import Self

    from ..preprocessing.preview import Preview
    from ..response.ocr import OcrChunk
    from ..tokenization.tokenizer import TokenizerCache
    from .late_interaction import TokenEmbeddings
    from .pooling_pipeline import PoolingResult

    T = TypeVar("T")
    RequestT = TypeVar(
        "RequestT", ChatRequest, OcrRequest, EmbeddingRequest, PoolingRequest, RerankRequest | ScoreRequest
    )


class ManagedEngine(ChatEngine):
    """One model of a `ModelManager`, which is loaded when a request needs it.

    Requests raise the errors of `Engine.chat`, and those of `ModelLoader.use`.

    Args:
        model: the model.
        engine: its engine.
        loader: starts and closes the engine.
        tokenizers: those of all models.
    """

    def __init__(self, model: ManagedModel, engine: Engine, loader: ModelLoader, tokenizers: TokenizerCache) -> None:
        self._model = model
        self._name = model.config.name
        self._engine = engine
        self._loader = loader
        self._tokenizers = tokenizers

    @property
    def config(self) -> EngineConfig:
        return self._model.config

    def chat(self, request: Request) -> ChatCompletion:
        parsed = self._named(ChatRequest.parse(request))
        with self._loader.use(self._name) as engine:
            return engine.chat(parsed)

    async def achat(self, request: Request) -> ChatCompletion:
        return await self._serve(ChatRequest.parse(request), Engine.achat)

    def stream(self, request: Request) -> Generator[ChatCompletionChunk, None, None]:
        parsed = self._named(ChatRequest.parse(request))
        with self._loader.use(self._name) as engine:
            yield from engine.stream(parsed)

    async def astream(self, request: Request) -> AsyncGenerator[ChatCompletionChunk, None]:
        parsed = self._named(ChatRequest.parse(request))
        async with self._loader.ause(self._name) as engine, contextlib.aclosing(engine.astream(parsed)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def aocr(self, request: AnyOcrRequest) -> AsyncGenerator[OcrChunk, None]:
        parsed = self._named(OcrRequest.parse(request))
        async with self._loader.ause(self._name) as engine, contextlib.aclosing(engine.aocr(parsed)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def aembed(self, request: EmbeddingRequest | Mapping[str, Any]) -> PoolingResult:
        return await self._serve(EmbeddingRequest.parse(request), Engine.aembed)

    async def aembed_tokens(self, request: PoolingRequest | Mapping[str, Any]) -> TokenEmbeddings:
        return await self._serve(PoolingRequest.parse(request), Engine.aembed_tokens)

    async def ascore(self, request: RerankRequest | ScoreRequest | Mapping[str, Any]) -> PoolingResult:
        return await self._serve(parse_scores(request), Engine.ascore)

    async def apreview(self, request: Request) -> Preview:
        return await self._serve(ChatRequest.parse(request), Engine.apreview)

    async def atokenize(self, request: Request) -> list[int]:
        return await self._serve(ChatRequest.parse(request), Engine.atokenize)

    async def aencode(self, text: str) -> list[int]:
        async with self._loader.ause(self._name) as engine:
            return await engine.aencode(text)

    async def adecode(self, ids: Sequence[int]) -> str:
        async with self._loader.ause(self._name) as engine:
            return await engine.adecode(ids)

    async def aconvert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        async with self._loader.ause(self._name) as engine:
            return await engine.aconvert_ids_to_tokens(ids)

    def status(self) -> EngineStatus:
        """Return the status of the model; while it is not loaded, of its configuration."""
        state, failure = self._loader.state(self._name)
        status = replace(self._engine.status(), aliases=self._model.aliases)
        if state == "ready":
            return replace(status, idle_seconds=self._loader.idle_seconds(self._name))
        config = self._model.config
        shown: dict[str, State] = {"loading": "loading", "unloading": "unloading"}
        task: Task | None = None if config.task == "auto" else config.task
        return replace(
            status,
            state=shown.get(state, "failed" if failure else "unloaded"),
            fatal_error=failure,
            task=status.task or task,
            loras=tuple(LoraStatus(name=lora.name, source=adapter_source(lora.path)) for lora in config.lora),
        )

    def capabilities(self) -> Capabilities:
        """Return what the model supports; while it is not loaded, what its configuration does.

        Raises:
            SetupError: the checkpoint is invalid.
        """
        try:
            return self._engine.capabilities()
        except EngineClosed:
            return configured_capabilities(self._model.config, self._tokenizers)

    def stats(self) -> EngineStats | None:
        """Return the counters since the model was loaded; None while it is not."""
        return self._engine.stats()

    def add_observer(self, observer: RequestObserver) -> None:
        self._engine.add_observer(observer)

    async def _serve(self, request: RequestT, work: Callable[[Engine, RequestT], Awaitable[T]]) -> T:
        async with self._loader.ause(self._name) as engine:
            return await work(engine, self._named(request))

    def _named(self, request: RequestT) -> RequestT:
        if request.model in self._model.aliases:
            return request.model_copy(update={"model": self._name})
        return request


class ModelManager(Startable, ChatEngine):
    """Serves several models, of which those are loaded that requests need and that fit in memory.

    `ModelScheduler` has the rules. Start it with `with ModelManager(models) as manager`, or `start`. A request names
    its model, an alias, or a LoRA adapter; one without a name is for the first model. Each model has its own caches. A
    request whose model is not loaded waits for it, and others do not wait for this one.

    Args:
        models: the models, at least one.
        policy: limits and times.
        registry: the plugins; those of the installed distributions if None.
        estimate: returns how many bytes a model needs; only used with a limit.
        clock: the monotonic clock of the policy, in seconds.

    Raises:
        ConfigError: two models have the same name, or one does not fit in the limit.
        CheckpointError: there is no such model.
    """

    manages_models: bool = True

    def __init__(
        self,
        models: Sequence[ManagedModel],
        *,
        policy: ModelPolicy | None = None,
        registry: Registry | None = None,
        estimate: Estimate = estimate_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        policy = policy or ModelPolicy()
        check_names(models)
        sizes = {model.config.name: 0 for model in models}
        if policy.memory_limit is not None:
            sizes = {model.config.name: estimate(model.config) for model in models}
            check_memory(models, sizes, policy.memory_limit)
        ruled = [
            RuledModel(name=model.config.name, estimate=sizes[model.config.name], pinned=model.pinned)
            for model in models
        ]
        workers = WorkerLimit(max(model.config.media_workers or default_workers() for model in models))
        shared = Shared(worker_limit=workers)
        self._models = tuple(models)
        self._tokenizers = shared.tokenizers
        engines = {model.config.name: Engine(model.config, registry=registry, shared=shared) for model in models}
        self._loader = ModelLoader(engines, ModelScheduler(ruled, policy), clock)
        self._registry = registry
        self._pinned = {model.config.name for model in models if model.pinned}
        stays = policy.memory_limit is None and policy.idle_unload is None
        self._initial = [model for model in models if stays or model.pinned]
        self._engines = {
            model.config.name: ManagedEngine(model, engines[model.config.name], self._loader, self._tokenizers)
            for model in models
        }
        self._names = names_of(models)
        self._shown_names = tuple(name for model in models for name in model.names)
        self._state: State = "closed"

    # Requests

    def for_model(self, name: str) -> ManagedEngine:
        """Return the engine of a model by its name, an alias, or the name of a LoRA adapter.

        Raises:
            ModelNotFound: there is none of this name.
        """
        if name not in self._names:
            raise ModelNotFound.among(self._shown_names, name)  # folders are names too, and are not disclosed
        return self._engines[self._names[name]]

    def models(self) -> Sequence[ManagedEngine]:
        return tuple(self._engines.values())

    def chat(self, request: Request) -> ChatCompletion:
        """Serve one request; blocks the calling thread. Raises the errors of `ManagedEngine`, and of `for_model`."""
        parsed = ChatRequest.parse(request)
        return self.for_model(parsed.model).chat(parsed)

    async def achat(self, request: Request) -> ChatCompletion:
        """Like `chat`, for callers on an event loop."""
        parsed = ChatRequest.parse(request)
        return await self.for_model(parsed.model).achat(parsed)

    def stream(self, request: Request) -> Generator[ChatCompletionChunk, None, None]:
        """Stream the response to one request; closing the iterator cancels it. Raises the errors of `chat`."""
        parsed = ChatRequest.parse(request)
        yield from self.for_model(parsed.model).stream(parsed)

    async def astream(self, request: Request) -> AsyncGenerator[ChatCompletionChunk, None]:
        """Like `stream`, for callers on an event loop."""
        parsed = ChatRequest.parse(request)
        async with contextlib.aclosing(self.for_model(parsed.model).astream(parsed)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def aocr(self, request: AnyOcrRequest) -> AsyncGenerator[OcrChunk, None]:
        parsed = OcrRequest.parse(request)
        async with contextlib.aclosing(self.for_model(parsed.model).aocr(parsed)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def aembed(self, request: EmbeddingRequest | Mapping[str, Any]) -> PoolingResult:
        parsed = EmbeddingRequest.parse(request)
        return await self.for_model(parsed.model).aembed(parsed)

    async def aembed_tokens(self, request: PoolingRequest | Mapping[str, Any]) -> TokenEmbeddings:
        parsed = PoolingRequest.parse(request)
        return await self.for_model(parsed.model).aembed_tokens(parsed)

    async def ascore(self, request: RerankRequest | ScoreRequest | Mapping[str, Any]) -> PoolingResult:
        parsed = parse_scores(request)
        return await self.for_model(parsed.model).ascore(parsed)

    async def apreview(self, request: Request) -> Preview:
        parsed = ChatRequest.parse(request)
        return await self.for_model(parsed.model).apreview(parsed)

    async def atokenize(self, request: Request) -> list[int]:
        parsed = ChatRequest.parse(request)
        return await self.for_model(parsed.model).atokenize(parsed)

    # Status

    def status(self) -> EngineStatus:
        """Return the status of the first model, with the state of the manager: `ready` between `start` and `close`, and
        `failed` if a decoder hangs, whose memory only the end of the process frees."""
        fatal_error = self._loader.fatal_error()
        return replace(
            self.models()[0].status(), state="failed" if fatal_error else self._state, fatal_error=fatal_error
        )

    def add_observer(self, observer: RequestObserver) -> None:
        """Notify `observer` of all events of requests to all models from now on."""
        for engine in self.models():
            engine.add_observer(observer)

    # Models

    def load(self, name: str) -> None:
        """Load a model now; blocks until it is ready, however long that takes.

        Raises:
            ModelNotFound: there is none of this name.
            EngineClosed: it cannot be loaded.
        """
        self.for_model(name)
        with self._loader.use(self._names[name], max_wait=float("inf")):
            pass

    async def aload(self, name: str) -> None:
        """Like `load`, for callers on an event loop."""
        self.for_model(name)
        async with self._loader.ause(self._names[name], max_wait=float("inf")):
            pass

    async def aunload(self, name: str) -> None:
        """Unload a model when its running requests have ended. Returns before that.

        Raises:
            ModelNotFound: there is none of this name.
            InvalidParameter: it is pinned.
        """
        self.for_model(name)
        if self._names[name] in self._pinned:
            raise InvalidParameter(f"The model {name!r} is pinned, and stays loaded.", param="model")
        self._loader.unload(self._names[name])

    def start(self) -> Self:
        """Load the pinned models; without a limit of memory or of idle time, all models. Returns when they are ready.

        Raises:
            SetupError: one of them cannot be loaded.
        """
        self._state = "loading"
        try:
            self._read_files()
            for model in self._initial:
                self.load(model.config.name)
        except EngineClosed as error:
            self._state = "closed"
            failure = self._loader.error(model.config.name) if error.code == LOAD_FAILED else None
            raise failure or error from None
        except SetupError:
            self._state = "closed"
            raise
        if self._state == "loading":  # it was not closed
            self._state = "ready"
        return self

    def _read_files(self) -> None:
        """Check all models before one is loaded, which takes long, and parse their tokenizers while no stream waits for
        the interpreter. Models that are not loaded now are not downloaded either."""
        registry = self._registry or load_plugins()
        for model in self._models:
            if model in self._initial or not is_hub_id(model.config.model, registered=registry.models):
                self._tokenizers.read(find_spec(model.config, registry, self._tokenizers).folder)

    def close(self) -> None:
        """Unload all models; running requests raise EngineClosed.

        Raises:
            DecoderFailed: a step of a decoder does not finish in time; all other models were unloaded.
        """
        self._state = "closed"
        self._loader.close()
