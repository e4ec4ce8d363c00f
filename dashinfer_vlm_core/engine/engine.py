"""The engine: loads a model and serves requests from any thread and any event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from ..concurrency.loop import LoopThread, engine_closed
from ..config import EngineConfig
from ..decoders import GUIDED_DECODING, DecoderStats
from ..errors import DecoderFailed, EngineClosed, UnsupportedParameter
from ..media.fetch import FetchStats
from ..media_workers import MediaWorkerStats
from ..models.memory import ModelSize
from ..models.model_card import ModelCard
from ..models.pooling import Task
from ..models.spec import Profile
from ..plugins import Registry, load_plugins
from ..preprocessing.pooling import PlacedItem
from ..progress import show_progress
from ..protocol import ChatRequest, EmbeddingRequest, LoRARequest, PoolingRequest, RerankRequest, ScoreRequest
from ..protocol.ocr import OcrRequest
from ..response.ocr import OcrChunk
from ..vision import VisionStats
from .capabilities import Capabilities
from .chat_pipeline import ChatPipeline, Generation
from .late_interaction import TokenEmbeddings
from .loading import Shared, load_pipeline
from .loras import LoraStatus
from .observers import ObserverList, RequestObserver
from .ocr import OcrPipeline
from .pooling_pipeline import PoolingPipeline, PoolingResult

if TYPE_CHECKING:
    from concurrent.futures import Future

    from openai.types.chat import ChatCompletion, ChatCompletionChunk
    from typing_extensions import Self

    from ..models.spec import ModelSpec
    from ..preprocessing.preview import Preview

logger: logging.Logger = logging.getLogger(__name__)

Request = ChatRequest | Mapping[str, Any]
AnyOcrRequest = OcrRequest | Mapping[str, Any]
State = Literal["closed", "loading", "ready", "restarting", "failed", "unloading", "unloaded"]


class ChatEngine(Protocol):
    """What adapters require from an engine, in this process or remote.

    A subclass inherits that it has one model, has no tokenizer, shows no media, has no statistics and notifies no
    observers.

    Attributes:
        manages_models: whether models are loaded and unloaded, so that each has its own state.
    """

    manages_models: bool = False

    def chat(self, request: Request) -> ChatCompletion: ...

    async def achat(self, request: Request) -> ChatCompletion: ...

    def stream(self, request: Request) -> Iterator[ChatCompletionChunk]: ...

    def astream(self, request: Request) -> AsyncGenerator[ChatCompletionChunk, None]: ...

    def status(self) -> EngineStatus: ...

    def aocr(self, request: AnyOcrRequest) -> AsyncGenerator[OcrChunk, None]:
        """Yield the pages of a document as Markdown, in order."""
        raise _unsupported("read documents")

    async def atokenize(self, request: Request) -> list[int]:
        """Return the token ids of a request's prompt."""
        raise _unsupported("tokenize")

    async def aencode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        raise _unsupported("tokenize")

    async def adecode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        raise _unsupported("detokenize")

    async def aconvert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the tokens as written in the vocabulary."""
        raise _unsupported("return the tokens' strings")

    async def aembed(self, request: EmbeddingRequest | Mapping[str, Any]) -> PoolingResult:
        """Return the embeddings of a request."""
        raise _unsupported("compute embeddings")

    async def ascore(self, request: RerankRequest | ScoreRequest | Mapping[str, Any]) -> PoolingResult:
        """Return how relevant each document is for a query."""
        raise _unsupported("score documents")

    async def aembed_tokens(self, request: PoolingRequest | Mapping[str, Any]) -> TokenEmbeddings:
        """Return the embeddings of all tokens of each item of a request."""
        raise _unsupported("embed tokens")

    async def apreview(self, request: Request) -> Preview:
        """Return the media as the model would see them."""
        raise _unsupported("preview media")

    def capabilities(self) -> Capabilities:
        """Return what the model supports: what most models do, if that is not known."""
        status = self.status()
        return Capabilities(
            profile=Profile(reasoning=bool(status.supports_reasoning)),
            max_model_len=status.max_model_len or None,
            guided_decoding=True,
            task=status.task or "generate",
        )

    def stats(self) -> EngineStats | None:
        """Return the counters of the engine in this process, if there is one."""
        return None

    def models(self) -> Sequence[ChatEngine]:
        """Return the engines of all models: itself, if it does not manage models."""
        return (self,)

    def for_model(self, name: str) -> ChatEngine:
        """Return the engine of the model that requests name so: itself, if it does not manage models.

        Raises:
            ModelNotFound: it does, and has none of this name.
        """
        return self

    async def aload(self, name: str) -> None:
        """Load a model, and return when it is ready."""
        raise _not_managed()

    async def aunload(self, name: str) -> None:
        """Unload a model when its running requests have ended. Returns before that."""
        raise _not_managed()

    def add_observer(self, observer: RequestObserver) -> None:
        """Notify `observer` of requests from now on."""


def _unsupported(work: str) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"This engine forwards requests to another server and cannot {work}. Send the request to that server.",
        code="not_supported",
    )


def _not_managed() -> UnsupportedParameter:
    return UnsupportedParameter(
        "The model of this server stays loaded. Start the server with several models, or with --idle-unload.",
        param="model",
        code="not_supported",
    )


def parse_scores(request: RerankRequest | ScoreRequest | Mapping[str, Any]) -> RerankRequest | ScoreRequest:
    return request if isinstance(request, RerankRequest) else ScoreRequest.parse(request)


class LoopEngine(ChatEngine, ABC):
    """Serves requests on an event loop in its own thread, for callers in any thread and any event loop."""

    @property
    @abstractmethod
    def _loop(self) -> LoopThread: ...

    @abstractmethod
    def _chat(self, request: Request) -> Coroutine[Any, Any, ChatCompletion]: ...

    @abstractmethod
    def _stream(self, request: Request) -> AsyncGenerator[ChatCompletionChunk, None]: ...

    @abstractmethod
    def _ocr(self, request: AnyOcrRequest) -> AsyncGenerator[OcrChunk, None]: ...

    def chat(self, request: Request) -> ChatCompletion:
        """Serve one request; blocks the calling thread.

        Raises:
            RequestError: the request is invalid; `param` names the field.
            EngineError: the engine could not serve it, or cannot be reached.
            AccessDenied: a remote engine rejected the API key.
        """
        return self._loop.call(self._chat(request))

    async def achat(self, request: Request) -> ChatCompletion:
        """Serve one request; canceling the caller frees the request's resources.

        Raises the same errors as `chat`.
        """
        return await self._loop.acall(self._chat(request))

    def stream(self, request: Request) -> Generator[ChatCompletionChunk, None, None]:
        """Stream the response to one request; closing the iterator cancels the request.

        Raises the same errors as `chat`, when a chunk is requested.
        """
        yield from self._loop.iterate(self._stream(request))

    async def astream(self, request: Request) -> AsyncGenerator[ChatCompletionChunk, None]:
        """Like `stream`, for callers on an event loop."""
        async with contextlib.aclosing(self._loop.aiterate(self._stream(request))) as chunks:
            async for chunk in chunks:
                yield chunk

    def ocr(self, request: AnyOcrRequest) -> Generator[OcrChunk, None, None]:
        """Yield the pages of a document as Markdown, in order; closing the iterator cancels the request.

        A page that fails has an error in place of its text. If all fail, the error of the first one is raised. Raises
        the same errors as `chat`, when a page is requested.
        """
        yield from self._loop.iterate(self._ocr(request))

    async def aocr(self, request: AnyOcrRequest) -> AsyncGenerator[OcrChunk, None]:
        """Like `ocr`, for callers on an event loop."""
        async with contextlib.aclosing(self._loop.aiterate(self._ocr(request))) as chunks:
            async for chunk in chunks:
                yield chunk


class Startable(ABC):
    """An engine that is started and closed, also by `with` and `async with`."""

    @abstractmethod
    def start(self) -> Self: ...

    @abstractmethod
    def close(self) -> None: ...

    async def astart(self) -> Self:
        """Like `start`, without blocking the caller's event loop."""
        await asyncio.to_thread(self.start)
        return self

    async def aclose(self) -> None:
        """Like `close`, without blocking the caller's event loop."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(self, *exc_info: object) -> None:
        """Close; if the `with` block raised, log an error of `close`, so that it does not replace the block's error."""
        try:
            self.close()
        except DecoderFailed as close_error:
            if exc_info[1] is None:
                raise
            logger.warning("%s", close_error.message)

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.to_thread(self.__exit__, *exc_info)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStatus:
    """The status of an engine.

    Attributes:
        state: `closed` before `start` and after `close`; `loading` during `start`; `restarting` while a decoder that
            died is replaced, and `failed` if that is not possible. A model of a `ModelManager` is `unloaded` while it
            is not needed, `unloading` until its memory is free, and `failed` after it could not be loaded.
        model: the name that requests use.
        decoder: the name of the decoder in use; empty while closed.
        decoder_reason: why this decoder was selected.
        max_model_len: the maximum number of tokens of prompt and completion together; 0 while closed.
        fatal_error: why a `failed` engine cannot continue; it must be started again.
        supports_reasoning: whether the model can reason before it responds; None if unknown, as of a closed engine.
        card: what users are shown of the model; empty while closed.
        loras: the LoRA adapters that requests can name as their model.
        task: what the model is used for; None if unknown, as of a closed engine.
        aliases: other names that requests can use for the model.
        max_parallel: see `EngineConfig`; 1 if it is not known.
        idle_seconds: after how many seconds without a request the model is unloaded; None if it stays loaded.
    """

    state: State
    model: str
    decoder: str = ""
    decoder_reason: str = ""
    max_model_len: int = 0
    fatal_error: str = ""
    supports_reasoning: bool | None = None
    card: ModelCard = field(default_factory=ModelCard)
    loras: tuple[LoraStatus, ...] = ()
    task: Task | None = None
    aliases: tuple[str, ...] = ()
    max_parallel: int = 1
    idle_seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """Counters of an engine.

    Attributes:
        active_requests: running or waiting completions, from arrival to the end of the response.
        max_active_requests: the maximum of `active_requests`.
        restarts: number of decoder restarts.
        vision: counters of the vision encoder and its cache.
        fetches: counters of fetched media.
        media_workers: counters of the processes that decode media.
        decoder: counters of the decoder.
    """

    active_requests: int
    max_active_requests: int
    restarts: int
    vision: VisionStats
    fetches: FetchStats
    media_workers: MediaWorkerStats
    decoder: DecoderStats


class _Running(NamedTuple):
    """The parts of a started engine."""

    loop: LoopThread
    pipeline: ChatPipeline
    ocr: OcrPipeline
    pooling: PoolingPipeline


class Engine(Startable, LoopEngine):
    """Serves chat requests, including images and videos, with one model.

    Start it with `with Engine(config) as engine`, `async with` or `start`. Any number of threads, tasks and event loops
    may then send requests concurrently: the stages run on the engine's event loop, in its own thread.

    Args:
        config: what to load and how; `EngineConfig()` if None.
        registry: the plugins; those of the installed distributions if None.
        shared: what it shares with other engines.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        registry: Registry | None = None,
        shared: Shared | None = None,
    ) -> None:
        self.config: EngineConfig = config or EngineConfig()
        self._registry = registry
        self._shared = shared
        self._observers = ObserverList()
        self._running: _Running | None = None
        self._loading = False
        self._lifecycle_lock = threading.Lock()

    # Requests

    @property
    def _loop(self) -> LoopThread:
        return self._ready().loop

    def _chat(self, request: Request) -> Coroutine[Any, Any, ChatCompletion]:
        return self._ready().pipeline.chat(ChatRequest.parse(request))

    def _stream(self, request: Request) -> AsyncGenerator[ChatCompletionChunk, None]:
        return self._ready().pipeline.stream(ChatRequest.parse(request))

    def _ocr(self, request: AnyOcrRequest) -> AsyncGenerator[OcrChunk, None]:
        return self._ready().ocr.stream(OcrRequest.parse(request))

    def submit(self, request: Request) -> Future[Generation]:
        """Submit one request; canceling the future frees the request's resources.

        The result includes the token ids of the prompt and the completions. Raises the same errors as `chat`, here or
        in the future.
        """
        running = self._ready()
        return running.loop.submit(running.pipeline.generate(ChatRequest.parse(request)))

    def embed(self, request: EmbeddingRequest | Mapping[str, Any]) -> PoolingResult:
        """Compute embeddings; blocks the calling thread.

        Raises the same errors as `chat`; `param` is the field with the index of the item, such as `input[3]`.
        """
        return self._loop.call(self._ready().pooling.embed(EmbeddingRequest.parse(request)))

    async def aembed(self, request: EmbeddingRequest | Mapping[str, Any]) -> PoolingResult:
        """Like `embed`, for callers on an event loop."""
        return await self._loop.acall(self._ready().pooling.embed(EmbeddingRequest.parse(request)))

    def embed_tokens(self, request: PoolingRequest | Mapping[str, Any]) -> TokenEmbeddings:
        """Compute the embeddings of all tokens of each item; blocks the calling thread.

        Raises the same errors as `embed`.
        """
        return self._loop.call(self._ready().pooling.embed_tokens(PoolingRequest.parse(request)))

    async def aembed_tokens(self, request: PoolingRequest | Mapping[str, Any]) -> TokenEmbeddings:
        """Like `embed_tokens`, for callers on an event loop."""
        return await self._loop.acall(self._ready().pooling.embed_tokens(PoolingRequest.parse(request)))

    def score(self, request: RerankRequest | ScoreRequest | Mapping[str, Any]) -> PoolingResult:
        """Compute how relevant documents are for queries; blocks the calling thread.

        A mapping has the fields of ScoreRequest. Raises the same errors as `embed`.
        """
        return self._loop.call(self._ready().pooling.score(parse_scores(request)))

    async def ascore(self, request: RerankRequest | ScoreRequest | Mapping[str, Any]) -> PoolingResult:
        """Like `score`, for callers on an event loop."""
        return await self._loop.acall(self._ready().pooling.score(parse_scores(request)))

    def score_pairs(
        self,
        request: ScoreRequest,
        *,
        lora_request: LoRARequest | None = None,
        on_done: Callable[[], object] | None = None,
    ) -> PoolingResult:
        """Compute scores like `score`, of any number of pairs; blocks the calling thread.

        Args:
            request: the pairs.
            lora_request: the LoRA adapter; None is the model itself.
            on_done: called in the engine's thread after each pair.

        Raises the same errors as `embed`.
        """
        pairs = self._ready().pooling.score_pairs(request, lora_request=lora_request, on_done=on_done)
        return self._loop.call(pairs)

    def pool(
        self,
        items: Sequence[PlacedItem],
        *,
        dimensions: int | None = None,
        on_done: Callable[[], object] | None = None,
    ) -> PoolingResult:
        """Compute the embeddings, or the scores, of prompts; blocks the calling thread.

        Args:
            items: the prompts, which use the same LoRA adapter.
            dimensions: the number of dimensions of embeddings; all by default.
            on_done: called in the engine's thread after each of them.

        Raises the same errors as `embed`.
        """
        return self._loop.call(self._ready().pooling.pool(items, dimensions=dimensions, on_done=on_done))

    def pool_tokens(
        self, items: Sequence[PlacedItem], *, on_done: Callable[[], object] | None = None
    ) -> TokenEmbeddings:
        """Compute the embeddings of all tokens of prompts; blocks the calling thread. See `pool`."""
        return self._loop.call(self._ready().pooling.pool_tokens(items, on_done=on_done))

    def preview(self, request: Request) -> Preview:
        """Return the media as the model would see them, and the length of the prompt; no model runs.

        Raises the same errors as `chat`; an image or video referenced by `uuid` alone cannot be previewed.
        """
        return self._loop.call(self._ready().pipeline.preview(ChatRequest.parse(request)))

    async def apreview(self, request: Request) -> Preview:
        """Like `preview`, for callers on an event loop."""
        return await self._loop.acall(self._ready().pipeline.preview(ChatRequest.parse(request)))

    async def atokenize(self, request: Request) -> list[int]:
        """Return the token ids of a request's prompt, with placeholders for images and videos.

        Raises the same errors as `chat`.
        """
        return await self._loop.acall(self._ready().pipeline.tokenize(ChatRequest.parse(request)))

    async def aencode(self, text: str) -> list[int]:
        """Return the token ids of a rendered prompt, in which special tokens are recognized.

        Raises the same errors as `chat`.
        """
        return await asyncio.to_thread(self._ready().pipeline.inputs.prompts.encode, text)

    async def adecode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids. Raises the same errors as `chat`."""
        return await asyncio.to_thread(self._ready().pipeline.inputs.prompts.decode, ids)

    async def aconvert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the tokens as written in the vocabulary. Raises the same errors as `chat`."""
        return await asyncio.to_thread(self._ready().pipeline.inputs.prompts.convert_ids_to_tokens, ids)

    def model_spec(self) -> ModelSpec:
        """Return the specification of the model. Raises EngineClosed if the engine is not ready."""
        return self._ready().pipeline.spec

    def capabilities(self) -> Capabilities:
        """Return what the model and its decoder support. Raises EngineClosed if the engine is not ready."""
        pipeline = self._ready().pipeline
        profile = pipeline.spec.profile
        if pipeline.decoder.unsupported_vision_reason:
            profile = replace(profile, images=False, videos=False)
        return Capabilities(
            profile=profile,
            max_model_len=pipeline.inputs.prompts.max_model_len,
            guided_decoding=GUIDED_DECODING in pipeline.decoder.supported_params,
            model_type=pipeline.spec.model_type,
            task=pipeline.spec.task,
            size=ModelSize.of(pipeline.spec),
        )

    # Status

    def add_observer(self, observer: RequestObserver) -> None:
        """Notify `observer` of all events of requests from now on."""
        self._observers.add(observer.for_model(self.config.name))

    def stats(self) -> EngineStats | None:
        """Return the counters since the engine was started; None while it is closed."""
        running = self._running
        if running is None:
            return None
        pipeline = running.pipeline
        return EngineStats(
            active_requests=pipeline.limiter.in_use,
            max_active_requests=pipeline.limiter.limit,
            restarts=pipeline.decoder.restarted,
            vision=pipeline.inputs.vision.stats,
            fetches=pipeline.inputs.media.stats,
            media_workers=pipeline.inputs.media_executor.stats,
            decoder=pipeline.decoder.snapshot(),
        )

    def status(self) -> EngineStatus:
        running = self._running
        if running is None:
            return EngineStatus(
                state="loading" if self._loading else "closed",
                model=self.config.name,
                max_parallel=self.config.max_parallel,
            )
        decoder = running.pipeline.decoder
        return EngineStatus(
            state="failed" if decoder.fatal_error else "restarting" if decoder.restarting else "ready",
            model=self.config.name,
            decoder=decoder.name,
            decoder_reason=running.pipeline.decoder_reason,
            max_model_len=running.pipeline.inputs.prompts.max_model_len,
            fatal_error=decoder.fatal_error,
            supports_reasoning=running.pipeline.inputs.prompts.supports_reasoning,
            card=running.pipeline.spec.card,
            loras=running.pipeline.loras.statuses,
            task=running.pipeline.spec.task,
            max_parallel=self.config.max_parallel,
        )

    @property
    def decoder_hangs(self) -> bool:
        """Whether a step of the decoder does not end, so that only the end of the process frees its memory."""
        running = self._running
        return running is not None and running.pipeline.decoder.hangs

    def start(self) -> Self:
        """Load the model; return when the engine is ready. Calling it again has no effect.

        Raises:
            SetupError: the configuration, the checkpoint or a plugin is invalid, or an extra is missing.
        """
        with self._lifecycle_lock:
            if self._running is None:
                self._loading = True
                try:
                    with show_progress(f"Loading {self.config.name}"):
                        self._running = self._load()
                finally:
                    self._loading = False
        return self

    def _load(self) -> _Running:
        loop = LoopThread("dashinfer-vlm-engine")
        try:
            registry = self._registry or load_plugins()
            pipeline = loop.call(load_pipeline(self.config, registry, self._observers, self._shared))
        except BaseException:
            loop.stop()
            raise
        return _Running(
            loop=loop,
            pipeline=pipeline,
            ocr=OcrPipeline.create(pipeline, self.config),
            pooling=PoolingPipeline.create(pipeline, self.config),
        )

    def close(self) -> None:
        """Release all resources; running requests raise EngineClosed. Calling it again has no effect.

        Raises:
            DecoderFailed: a step of the decoder does not finish in time, and `status` has not reported it yet;
                everything else was released.
        """
        with self._lifecycle_lock:
            running = self._running
            self._running = None
            if running is not None:
                running.loop.stop(cleanup=running.pipeline.close())

    def _ready(self) -> _Running:
        running = self._running
        if running is None:
            if self._loading:
                raise EngineClosed("The model is being loaded. Try again in a moment.", code="engine_loading")
            raise engine_closed()
        return running
