"""The engine: loads a model, and lets any thread and any event loop ask it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..concurrency.loop import LoopThread, closed
from ..config import MIB, EngineConfig
from ..decoders import DecoderFactory, DecoderStats, DecoderSupport
from ..decoders.supervisor import Supervisor
from ..errors import DecoderFailed, EngineClosed, SetupError
from ..kernels.choice import KernelSelector
from ..media import FetchStats, MediaLoader
from ..models.checkpoint import find_model
from ..plugins import Registry, load_plugins
from ..preprocessing.prompt import PromptBuilder
from ..protocol import ChatRequest
from ..structured_output.grammar_compiler import GrammarCompiler
from ..tokenization.detokenizer import IncrementalDetokenizer
from ..vision import VisionService, VisionStats
from ..vision.media_uuids import MediaUuidCache
from .chat_pipeline import ChatPipeline, ConcurrencyLimiter, Generation
from .observers import ObserverList, RequestObserver

if TYPE_CHECKING:
    from concurrent.futures import Future
    from types import TracebackType

    from openai.types.chat import ChatCompletion, ChatCompletionChunk
    from typing_extensions import Self

    from ..models.interface import ModelFamily
    from ..models.spec import ModelSpec
    from ..preprocessing.preview import Preview

logger: logging.Logger = logging.getLogger(__name__)

Request = ChatRequest | Mapping[str, Any]
State = Literal["closed", "loading", "ready", "restarting", "failed"]


class ChatEngine(Protocol):
    """What adapters need of an engine, wherever it runs."""

    def chat(self, request: Request) -> ChatCompletion: ...

    async def achat(self, request: Request) -> ChatCompletion: ...

    def stream(self, request: Request) -> Iterator[ChatCompletionChunk]: ...

    def astream(self, request: Request) -> AsyncGenerator[ChatCompletionChunk, None]: ...

    def status(self) -> EngineStatus: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStatus:
    """How an engine is.

    Attributes:
        state: `closed` before `start` and after `close`, `loading` in between; `restarting` while a decoder that died
            is being replaced, and `failed` when it cannot be.
        model: the name that requests use.
        decoder: name of the decoder in use; empty while closed.
        decoder_reason: why this decoder and no other.
        max_model_len: tokens that prompt and answer may have together; 0 while closed.
        trouble: why a `failed` engine cannot answer any more; it has to be started again.
    """

    state: State
    model: str
    decoder: str = ""
    decoder_reason: str = ""
    max_model_len: int = 0
    fatal_error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """What an engine does and has done.

    Attributes:
        answers: that are being made or wait, from their request's arrival on.
        places: most of them.
        restarts: how often the decoder was replaced.
        vision: of the tower and its cache.
        fetches: of media from the web.
        decoder: of the language model.
    """

    active_requests: int
    max_active_requests: int
    restarts: int
    vision: VisionStats
    fetches: FetchStats
    decoder: DecoderStats


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Running:
    """What a started engine holds."""

    loop: LoopThread
    pipeline: ChatPipeline
    reason: str


class Engine:
    """Answers chat requests about pictures and videos with one model.

    Start it by `with Engine(config) as engine`, by `async with`, or by `start`. Then any number of threads, tasks and
    event loops may ask at once: its stages run on an event loop of its own, in a thread of its own.

    Args:
        config: what to load and how; `EngineConfig()` if None.
        registry: plugins to use; those of the installed distributions if None.
    """

    def __init__(self, config: EngineConfig | None = None, *, registry: Registry | None = None) -> None:
        self.config: EngineConfig = config or EngineConfig()
        self._name = self.config.name
        self._registry = registry
        self._observers = ObserverList()
        self._running: _Running | None = None
        self._loading = False
        self._life = threading.Lock()

    # Ask

    def chat(self, request: Request) -> ChatCompletion:
        """Answer one request, blocking the caller's thread.

        Raises:
            RequestError: the request is wrong; `param` names the field.
            EngineError: the engine could not serve it now.
        """
        running, parsed = self._ready(), ChatRequest.parse(request)
        return running.loop.call(running.pipeline.chat(parsed))

    async def achat(self, request: Request) -> ChatCompletion:
        """Answer one request; cancelling the caller frees everything that the request held. Raises as `chat`."""
        running, parsed = self._ready(), ChatRequest.parse(request)
        return await running.loop.acall(running.pipeline.chat(parsed))

    def submit(self, request: Request) -> Future[Generation]:
        """Begin to answer one request; cancelling the future frees everything that the request held.

        The answer comes with the tokens of prompt and answer. Raises as `chat`, here or in the future.
        """
        running, parsed = self._ready(), ChatRequest.parse(request)
        return running.loop.submit(running.pipeline.generate(parsed))

    def stream(self, request: Request) -> Generator[ChatCompletionChunk, None, None]:
        """Answer one request chunk by chunk; closing the iterator cancels the rest.

        Raises as `chat`, when the first chunk is taken.
        """
        running, parsed = self._ready(), ChatRequest.parse(request)
        yield from running.loop.iterate(running.pipeline.stream(parsed))

    async def astream(self, request: Request) -> AsyncGenerator[ChatCompletionChunk, None]:
        """As `stream`, for callers on an event loop of their own."""
        running, parsed = self._ready(), ChatRequest.parse(request)
        async with contextlib.aclosing(running.loop.aiterate(running.pipeline.stream(parsed))) as chunks:
            async for chunk in chunks:
                yield chunk

    def preview(self, request: Request) -> Preview:
        """What the model would see of a request, and the tokens of its prompt; nothing is encoded or answered.

        Raises as `chat`; a picture or video that comes by its `uuid` alone cannot be shown.
        """
        running, parsed = self._ready(), ChatRequest.parse(request)
        return running.loop.call(running.pipeline.preview(parsed))

    async def apreview(self, request: Request) -> Preview:
        """As `preview`, for callers on an event loop of their own."""
        running, parsed = self._ready(), ChatRequest.parse(request)
        return await running.loop.acall(running.pipeline.preview(parsed))

    async def atokenize(self, request: Request) -> list[int]:
        """The token ids of a request's prompt; pictures and videos stand there as placeholders. Raises as `chat`."""
        running, parsed = self._ready(), ChatRequest.parse(request)
        return await running.loop.acall(running.pipeline.tokenize(parsed))

    async def aencode(self, text: str) -> list[int]:
        """The token ids of a rendered prompt, whose control tokens count as such. Raises as `chat`."""
        return await asyncio.to_thread(self._ready().pipeline.prompts.encode, text)

    async def adecode(self, ids: Sequence[int]) -> str:
        """The text of token ids. Raises as `chat`."""
        return await asyncio.to_thread(self._ready().pipeline.prompts.decode, ids)

    async def aconvert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Tokens as the vocabulary spells them. Raises as `chat`."""
        return await asyncio.to_thread(self._ready().pipeline.prompts.convert_ids_to_tokens, ids)

    # Look after

    def add_observer(self, observer: RequestObserver) -> None:
        """Tell `watcher` what happens to requests from now on."""
        self._observers.add(observer)

    def stats(self) -> EngineStats | None:
        """What it does and has done since it was started; None while it is closed."""
        if self._running is None:
            return None
        pipeline = self._running.pipeline
        return EngineStats(
            active_requests=pipeline.limiter.in_use,
            max_active_requests=pipeline.limiter.limit,
            restarts=pipeline.decoder.restarted,
            vision=pipeline.vision.stats,
            fetches=pipeline.media.stats,
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
        )

    # Start and close

    def start(self) -> Self:
        """Load the model; returns when it can answer. Starting twice is allowed.

        Raises:
            SetupError: the configuration, the checkpoint, a plugin or a missing extra is in the way.
        """
        with self._life:
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
        """Free everything; running requests end with EngineClosed. Closing twice is allowed.

        Raises:
            DecoderFailed: a step of the decoder does not end soon, and `status` did not say so yet; all else was freed.
        """
        with self._life:
            running, self._running = self._running, None
            if running is not None:
                running.loop.stop(last=running.pipeline.close())

    async def astart(self) -> Self:
        """As `start`, without blocking the caller's event loop."""
        await asyncio.to_thread(self.start)
        return self

    async def aclose(self) -> None:
        """As `close`, without blocking the caller's event loop."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error)

    async def __aenter__(self) -> Self:
        return await self.astart()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self._leave, error)

    def _leave(self, error: BaseException | None) -> None:
        """Close; what went wrong in the `with` block is for its caller to see, and not what goes wrong here."""
        try:
            self.close()
        except DecoderFailed as failure:
            if error is None:
                raise
            logger.warning("%s", failure.message)

    def _ready(self) -> _Running:
        running = self._running
        if running is None:
            if self._loading:
                raise EngineClosed("The model is being loaded: try again in a moment.", code="engine_loading")
            raise closed()
        return running


async def load_pipeline(
    config: EngineConfig, registry: Registry, observer: RequestObserver
) -> tuple[ChatPipeline, str]:
    """Load what `config` names; a conductor that can answer, and why it has the decoder that it has.

    Raises:
        SetupError: something of the set-up is missing or wrong; the message says what to mend.
    """
    folder = await asyncio.to_thread(find_model, config.model, registered=registry.models, revision=config.revision)
    family = registry.family_of(folder)
    spec = family.load_spec(folder)
    kernels = KernelSelector(registry.kernels.values(), config)
    factory, reason = select_decoder(registry, spec, config)
    logger.info("model %s from %s, decoder %s: %s", config.name, folder, factory.name, reason)
    decoder = await asyncio.to_thread(
        Supervisor, lambda: factory.create(spec, config, kernels), restarts=config.decoder_restarts
    )
    prompts = await asyncio.to_thread(
        PromptBuilder.load, spec, family.prompt_layout(spec), config, max_model_len=decoder.max_model_len
    )
    # Refuses, now rather than at the first answer, a tokenizer whose tokens are no bytes.
    IncrementalDetokenizer(prompts.tokenizer)
    processor = family.image_processor(spec, config)
    vision = await asyncio.to_thread(_load_vision, family, spec, config, kernels)
    try:
        await decoder.start()
    except BaseException:
        await decoder.close()
        raise
    pipeline = ChatPipeline(
        name=config.name,
        aliases=frozenset({config.model}),
        limiter=ConcurrencyLimiter(config.max_batch_size + config.max_waiting),
        spec=spec,
        media=MediaLoader(config, list(registry.video_readers.values()), policy=spec.video),
        processor=processor,
        prompts=prompts,
        vision=vision,
        media_uuids=MediaUuidCache(vision, limit=config.max_media_ids),
        grammars=GrammarCompiler(prompts.tokenizer, spec),
        decoder=decoder,
        observer=observer,
    )
    return pipeline, reason


def _load_vision(family: ModelFamily, spec: ModelSpec, config: EngineConfig, kernels: KernelSelector) -> VisionService:
    encoder = family.load_vision_encoder(spec, config, kernels)
    batch_patches = min(config.vision_batch_patches, encoder.batch_patches)
    return VisionService(encoder, cache_bytes=config.vision_cache_mib * MIB, batch_patches=batch_patches)


def select_decoder(registry: Registry, spec: ModelSpec, config: EngineConfig) -> tuple[DecoderFactory, str]:
    """The decoder to use, and why.

    Raises:
        PluginError: no decoder of the name asked for is registered.
        SetupError: it cannot run here, or none can, or an option of a plugin cannot be honoured by it.
    """
    names = sorted(registry.decoders) if config.decoder == "auto" else [config.decoder]
    fits = [(_fitness(registry.decoder(name), spec, config), registry.decoder(name)) for name in names]
    best, factory = max(fits, key=lambda fit: fit[0].score, default=(None, None))
    if best is None or factory is None or best.score <= 0:
        reasons = (
            "; ".join(f"{factory.name}: {check_support.reason}" for check_support, factory in fits)
            or "none is registered"
        )
        raise SetupError(f"No decoder can run here ({reasons}). `dashinfer-vlm plugins` lists what is installed.")
    for options in config.plugin_options:
        options.check(factory.name)
    others = [f"{other.name}: {check_support.reason}" for check_support, other in fits if other is not factory]
    return factory, " ".join([best.reason, *(["Passed over:"] if others else []), *others])


def _fitness(factory: DecoderFactory, spec: ModelSpec, config: EngineConfig) -> DecoderSupport:
    """A decoder that fails at being asked cannot run; the others can."""
    try:
        return factory.check_support(spec, config)
    except Exception as error:
        logger.exception("the decoder %s cannot say whether it can run", factory.name)
        return DecoderSupport(score=0, reason=f"it failed when it was asked: {error}")
