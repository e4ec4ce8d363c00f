"""The engine: loads a model and serves requests from any thread and any event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..concurrency.loop import LoopThread, engine_closed
from ..config import MIB, EngineConfig
from ..decoders import GUIDED_DECODING, LORA, DecoderFactory, DecoderStats, DecoderSupport
from ..decoders.supervisor import Supervisor
from ..errors import DecoderFailed, EngineClosed, SetupError
from ..kernels.choice import KernelSelector
from ..media import FetchStats, MediaLoader
from ..media.decoder import MediaDecoder
from ..media.video import select_readers
from ..media_workers import MediaWorkerStats, create_executor
from ..models.checkpoint import find_model
from ..plugins import Registry, load_plugins
from ..preprocessing.prompt import PromptBuilder
from ..protocol import ChatRequest
from ..structured_output.request_grammars import RequestGrammars
from ..tokenization.detokenizer import IncrementalDetokenizer
from ..vision import VisionService, VisionStats
from ..vision.media_uuids import MediaUuidCache
from .capabilities import Capabilities
from .chat_pipeline import ChatPipeline
from .generation import Generation
from .limiter import ConcurrencyLimiter
from .loras import LoraManager, LoraStatus
from .observers import ObserverList, RequestObserver
from .vision_store import open_vision_store

if TYPE_CHECKING:
    from concurrent.futures import Future
    from types import TracebackType

    from openai.types.chat import ChatCompletion, ChatCompletionChunk
    from typing_extensions import Self

    from ..models.interface import ModelFamily, VisionEncoder
    from ..models.lora import LoraWeights
    from ..models.spec import ModelSpec
    from ..preprocessing.preview import Preview

logger: logging.Logger = logging.getLogger(__name__)

Request = ChatRequest | Mapping[str, Any]
State = Literal["closed", "loading", "ready", "restarting", "failed"]


class ChatEngine(Protocol):
    """What adapters require from an engine, in this process or remote."""

    def chat(self, request: Request) -> ChatCompletion: ...

    async def achat(self, request: Request) -> ChatCompletion: ...

    def stream(self, request: Request) -> Iterator[ChatCompletionChunk]: ...

    def astream(self, request: Request) -> AsyncGenerator[ChatCompletionChunk, None]: ...

    def status(self) -> EngineStatus: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStatus:
    """The status of an engine.

    Attributes:
        state: `closed` before `start` and after `close`; `loading` during `start`; `restarting` while a decoder that
            died is replaced, and `failed` if that is not possible.
        model: the name that requests use.
        decoder: the name of the decoder in use; empty while closed.
        decoder_reason: why this decoder was selected.
        max_model_len: the maximum number of tokens of prompt and completion together; 0 while closed.
        fatal_error: why a `failed` engine cannot continue; it must be started again.
        supports_reasoning: whether the model can reason before it responds; None if unknown, as of a closed engine.
        loras: the LoRA adapters that requests can name as their model.
    """

    state: State
    model: str
    decoder: str = ""
    decoder_reason: str = ""
    max_model_len: int = 0
    fatal_error: str = ""
    supports_reasoning: bool | None = None
    loras: tuple[LoraStatus, ...] = ()


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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Running:
    """The parts of a started engine."""

    loop: LoopThread
    pipeline: ChatPipeline
    reason: str


class Engine:
    """Serves chat requests, including images and videos, with one model.

    Start it with `with Engine(config) as engine`, `async with` or `start`. Any number of threads, tasks and event loops
    may then send requests concurrently: the stages run on the engine's event loop, in its own thread.

    Args:
        config: what to load and how; `EngineConfig()` if None.
        registry: the plugins; those of the installed distributions if None.
    """

    def __init__(self, config: EngineConfig | None = None, *, registry: Registry | None = None) -> None:
        self.config: EngineConfig = config or EngineConfig()
        self._name = self.config.name
        self._registry = registry
        self._observers = ObserverList()
        self._running: _Running | None = None
        self._loading = False
        self._lifecycle_lock = threading.Lock()

    # Requests

    def chat(self, request: Request) -> ChatCompletion:
        """Serve one request; blocks the calling thread.

        Raises:
            RequestError: the request is invalid; `param` names the field.
            EngineError: the engine could not serve it.
        """
        running, parsed = self._ready(), ChatRequest.parse(request)
        return running.loop.call(running.pipeline.chat(parsed))

    async def achat(self, request: Request) -> ChatCompletion:
        """Serve one request; canceling the caller frees the request's resources.

        Raises the same errors as `chat`.
        """
        running, parsed = self._ready(), ChatRequest.parse(request)
        return await running.loop.acall(running.pipeline.chat(parsed))

    def submit(self, request: Request) -> Future[Generation]:
        """Submit one request; canceling the future frees the request's resources.

        The result includes the token ids of the prompt and the completions. Raises the same errors as `chat`, here or
        in the future.
        """
        running, parsed = self._ready(), ChatRequest.parse(request)
        return running.loop.submit(running.pipeline.generate(parsed))

    def stream(self, request: Request) -> Generator[ChatCompletionChunk, None, None]:
        """Stream the response to one request; closing the iterator cancels the request.

        Raises the same errors as `chat`, when the first chunk is requested.
        """
        running, parsed = self._ready(), ChatRequest.parse(request)
        yield from running.loop.iterate(running.pipeline.stream(parsed))

    async def astream(self, request: Request) -> AsyncGenerator[ChatCompletionChunk, None]:
        """Like `stream`, for callers on an event loop."""
        running, parsed = self._ready(), ChatRequest.parse(request)
        async with contextlib.aclosing(running.loop.aiterate(running.pipeline.stream(parsed))) as chunks:
            async for chunk in chunks:
                yield chunk

    def preview(self, request: Request) -> Preview:
        """Return the media as the model would see them, and the length of the prompt; no model runs.

        Raises the same errors as `chat`; an image or video referenced by `uuid` alone cannot be previewed.
        """
        running, parsed = self._ready(), ChatRequest.parse(request)
        return running.loop.call(running.pipeline.preview(parsed))

    async def apreview(self, request: Request) -> Preview:
        """Like `preview`, for callers on an event loop."""
        running, parsed = self._ready(), ChatRequest.parse(request)
        return await running.loop.acall(running.pipeline.preview(parsed))

    async def atokenize(self, request: Request) -> list[int]:
        """Return the token ids of a request's prompt, with placeholders for images and videos.

        Raises the same errors as `chat`.
        """
        running, parsed = self._ready(), ChatRequest.parse(request)
        return await running.loop.acall(running.pipeline.tokenize(parsed))

    async def aencode(self, text: str) -> list[int]:
        """Return the token ids of a rendered prompt, in which special tokens are recognized.

        Raises the same errors as `chat`.
        """
        return await asyncio.to_thread(self._ready().pipeline.prompts.encode, text)

    async def adecode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids. Raises the same errors as `chat`."""
        return await asyncio.to_thread(self._ready().pipeline.prompts.decode, ids)

    async def aconvert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the tokens as written in the vocabulary. Raises the same errors as `chat`."""
        return await asyncio.to_thread(self._ready().pipeline.prompts.convert_ids_to_tokens, ids)

    # Model

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
            max_model_len=pipeline.prompts.max_model_len,
            guided_decoding=GUIDED_DECODING in pipeline.decoder.supported_params,
        )

    # Status

    def add_observer(self, observer: RequestObserver) -> None:
        """Notify `observer` of all events of requests from now on."""
        self._observers.add(observer)

    def stats(self) -> EngineStats | None:
        """Return the counters since the engine was started; None while it is closed."""
        if self._running is None:
            return None
        pipeline = self._running.pipeline
        return EngineStats(
            active_requests=pipeline.limiter.in_use,
            max_active_requests=pipeline.limiter.limit,
            restarts=pipeline.decoder.restarted,
            vision=pipeline.vision.stats,
            fetches=pipeline.media.stats,
            media_workers=pipeline.media_executor.stats,
            decoder=pipeline.decoder.snapshot(),
        )

    def status(self) -> EngineStatus:
        running = self._running
        if running is None:
            return EngineStatus(state="loading" if self._loading else "closed", model=self._name)
        decoder = running.pipeline.decoder
        return EngineStatus(
            state="failed" if decoder.fatal_error else "restarting" if decoder.restarting else "ready",
            model=self._name,
            decoder=decoder.name,
            decoder_reason=running.reason,
            max_model_len=running.pipeline.prompts.max_model_len,
            fatal_error=decoder.fatal_error,
            supports_reasoning=running.pipeline.prompts.supports_reasoning,
            loras=running.pipeline.loras.statuses,
        )

    # Start and close

    def start(self) -> Self:
        """Load the model; return when the engine is ready. Calling it again has no effect.

        Raises:
            SetupError: the configuration, the checkpoint or a plugin is invalid, or an extra is missing.
        """
        with self._lifecycle_lock:
            if self._running is None:
                self._loading = True
                try:
                    self._running = self._load()
                finally:
                    self._loading = False
        return self

    def _load(self) -> _Running:
        loop = LoopThread("dashinfer-vlm-engine")
        try:
            registry = self._registry or load_plugins()
            pipeline, reason = loop.call(load_pipeline(self.config, registry, self._observers))
        except BaseException:
            loop.stop()
            raise
        return _Running(loop=loop, pipeline=pipeline, reason=reason)

    def close(self) -> None:
        """Release all resources; running requests raise EngineClosed. Calling it again has no effect.

        Raises:
            DecoderFailed: a step of the decoder does not finish in time, and `status` has not reported it yet;
                everything else was released.
        """
        with self._lifecycle_lock:
            running, self._running = self._running, None
            if running is not None:
                running.loop.stop(cleanup=running.pipeline.close())

    async def astart(self) -> Self:
        """Like `start`, without blocking the caller's event loop."""
        await asyncio.to_thread(self.start)
        return self

    async def aclose(self) -> None:
        """Like `close`, without blocking the caller's event loop."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exit(exc)

    async def __aenter__(self) -> Self:
        return await self.astart()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self._exit, exc)

    def _exit(self, error: BaseException | None) -> None:
        """Close; if the `with` block raised, log an error of `close`, so that it does not replace the block's error."""
        try:
            self.close()
        except DecoderFailed as close_error:
            if error is None:
                raise
            logger.warning("%s", close_error.message)

    def _ready(self) -> _Running:
        running = self._running
        if running is None:
            if self._loading:
                raise EngineClosed("The model is being loaded. Try again in a moment.", code="engine_loading")
            raise engine_closed()
        return running


async def load_pipeline(
    config: EngineConfig, registry: Registry, observer: RequestObserver
) -> tuple[ChatPipeline, str]:
    """Load the model and start the decoder; return the pipeline, and why this decoder was selected.

    Raises:
        SetupError: the setup is incomplete or invalid; the message says how to fix it.
    """
    config = registry.resolve_options(config)
    readers = select_readers(registry.video_readers, config)
    folder = await asyncio.to_thread(find_model, config.model, registered=registry.models, revision=config.revision)
    family = registry.family_of(folder)
    spec = registry.load_spec(folder)
    kernels = KernelSelector(registry.kernels.values(), config)
    factory, reason = select_decoder(registry, spec, config)
    logger.info("model %s from %s, decoder %s: %s", config.name, folder, factory.name, reason)
    decoder = await asyncio.to_thread(
        Supervisor, lambda: factory.create(spec, config, kernels), restarts=config.limits.decoder_restarts
    )
    prompts = await asyncio.to_thread(
        PromptBuilder.load, spec, family.prompt_layout(spec), config, max_model_len=decoder.max_model_len
    )
    # Rejects a tokenizer that is not byte-level now, rather than at the first request.
    IncrementalDetokenizer(prompts.tokenizer)
    processor = family.image_processor(spec, config)
    vision = await asyncio.to_thread(_load_vision, family, spec, config, kernels, registry)
    loras = LoraManager(
        model=config.name,
        aliases=frozenset({config.model}),
        spec=spec,
        decoder=decoder,
        load_encoder=partial(_load_adapted_encoder, family, spec, config, kernels),
        limit=max(config.limits.max_loras, len(config.lora)),
    )
    try:
        await decoder.start()
        await loras.load_all(config)
        media_executor = create_executor(
            config,
            family=family,
            folder=folder,
            spec=spec,
            processor=processor,
            decoder=MediaDecoder(config=config, readers=readers, policy=spec.video.with_config(config)),
        )
    except BaseException:
        await decoder.close()
        await vision.close()
        raise
    pipeline = ChatPipeline(
        name=config.name,
        limiter=ConcurrencyLimiter(config.max_batch_size + config.max_waiting),
        spec=spec,
        media=MediaLoader(config, readers, policy=spec.video),
        media_executor=media_executor,
        processor=processor,
        prompts=prompts,
        vision=vision,
        media_uuids=MediaUuidCache(vision, limit=config.limits.max_media_ids),
        grammars=RequestGrammars(prompts.tokenizer, spec),
        decoder=decoder,
        loras=loras,
        observer=observer,
    )
    return pipeline, reason


def _load_vision(
    family: ModelFamily, spec: ModelSpec, config: EngineConfig, kernels: KernelSelector, registry: Registry
) -> VisionService:
    encoder = family.load_vision_encoder(spec, config, kernels)
    return VisionService(
        encoder,
        model_key=kernels.vision_name.encode(),
        cache_bytes=config.vision_cache_mib * MIB,
        batch_patches=encoder.batch_patches,
        store=open_vision_store(registry, family, spec, config, kernels=kernels, encoder=encoder),
    )


def _load_adapted_encoder(
    family: ModelFamily, spec: ModelSpec, config: EngineConfig, kernels: KernelSelector, lora: LoraWeights
) -> VisionEncoder:
    """Load the vision encoder with the changes of an adapter."""
    encoder = family.load_vision_encoder(spec, config, kernels, lora)
    logger.info("LoRA adapter %r changes the vision encoder: it needs the memory of another one.", lora.name)
    return encoder


def select_decoder(registry: Registry, spec: ModelSpec, config: EngineConfig) -> tuple[DecoderFactory, str]:
    """Select the decoder; return its factory and the reason.

    Raises:
        PluginError: no decoder of the requested name is registered.
        SetupError: the requested decoder, or every decoder, cannot run here, or the selected one does not support an
            option of a plugin.
    """
    names = sorted(registry.decoders) if config.decoder == "auto" else [config.decoder]
    candidates = [(_check_support(registry.decoder(name), spec, config), registry.decoder(name)) for name in names]
    best, factory = max(candidates, key=lambda candidate: candidate[0].score, default=(None, None))
    if best is None or factory is None or best.score <= 0:
        reasons = (
            "; ".join(f"{factory.name}: {support.reason}" for support, factory in candidates) or "none is registered"
        )
        raise SetupError(f"No decoder can run here ({reasons}). `dashinfer-vlm plugins` lists what is installed.")
    for kind in registry.option_classes:
        config.options_of(kind).check(factory.name)
    others = [f"{other.name}: {support.reason}" for support, other in candidates if other is not factory]
    return factory, " ".join([best.reason, *(["Not selected:"] if others else []), *others])


def _check_support(factory: DecoderFactory, spec: ModelSpec, config: EngineConfig) -> DecoderSupport:
    """Check a decoder; an exception means that it cannot run, and does not affect the other decoders."""
    if config.lora and (reason := _unsupported_lora_reason(factory)):
        return DecoderSupport(score=0, reason=reason)
    try:
        return factory.check_support(spec, config)
    except Exception as error:
        logger.exception("check_support of the decoder %s failed", factory.name)
        return DecoderSupport(score=0, reason=f"its check failed: {error}")


def _unsupported_lora_reason(factory: DecoderFactory) -> str:
    """Return why a decoder does not apply LoRA adapters; empty if it does."""
    if LORA in factory.supported_params:
        return ""
    return "It does not apply LoRA adapters (`lora`). Merge the adapter into a checkpoint, or use the decoder torch."
