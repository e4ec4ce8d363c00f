"""The conductor: one line per stage of a request, usable from any thread and any event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import queue
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from .checkpoint import find_model, model_type
from .config import MIB, EngineConfig
from .decoder import Decoder, DecodeRequest, DecoderFactory, VisualSpan
from .errors import (
    DashInferVLMError,
    EngineClosed,
    EngineError,
    InvalidParameter,
    ModelNotFound,
    SetupError,
    UnsupportedParameter,
)
from .media import Media, MediaLoader
from .patches import Patcher, Patches
from .plugins import Registry, load_plugins
from .prompt import Prompt, PromptBuilder
from .reply import PromptCounts, Reply
from .schema import DEFAULT_MAX_TOKENS, DEFAULT_MODEL, ChatRequest
from .vision import VisionService, VisualTokens

if TYPE_CHECKING:
    from types import TracebackType

    from openai.types.chat import ChatCompletion, ChatCompletionChunk
    from typing_extensions import Self

    from .decoder import Token
    from .model import ModelSpec

logger = logging.getLogger(__name__)

T = TypeVar("T")
Request = ChatRequest | Mapping[str, Any]


class ChatEngine(Protocol):
    """What adapters need of an engine, wherever it runs."""

    def chat(self, request: Request) -> ChatCompletion: ...

    async def achat(self, request: Request) -> ChatCompletion: ...

    def stream(self, request: Request) -> Iterator[ChatCompletionChunk]: ...

    def astream(self, request: Request) -> AsyncIterator[ChatCompletionChunk]: ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineStatus:
    """How an engine is.

    Attributes:
        state: `closed` before `start` and after `close`.
        model: the name that requests use.
        decoder: name of the decoder in use; empty while closed.
        decoder_reason: why this decoder and no other.
        max_model_len: tokens that prompt and answer may have together; 0 while closed.
    """

    state: Literal["closed", "ready"]
    model: str
    decoder: str = ""
    decoder_reason: str = ""
    max_model_len: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rooms:
    """What a started engine consists of, in the order a request walks through it."""

    spec: ModelSpec
    media: MediaLoader
    patcher: Patcher
    prompts: PromptBuilder
    vision: VisionService
    decoder: Decoder
    decoder_reason: str


class Engine:
    """Answers chat requests about pictures and videos with one model.

    Start it by `with Engine(config) as engine`, by `async with`, or by `start`. Then any number of threads, tasks and
    event loops may ask at once: its stages run on an event loop of its own, in a thread of its own.

    Args:
        config: what to load and how; `EngineConfig()` if None.
        registry: plugins to use; those of the installed distributions if None.
    """

    def __init__(self, config: EngineConfig | None = None, *, registry: Registry | None = None) -> None:
        self.config = config or EngineConfig()
        self._registry = registry
        self._rooms: Rooms | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._life = threading.Lock()

    # The life of a request

    async def _prepare(self, request: ChatRequest) -> tuple[Reply, DecodeRequest]:
        rooms = self._ready()
        self._admit(request, rooms)
        media = await rooms.media.load(request.media())
        patches = await _cut(rooms.patcher, media)
        prompt = await asyncio.to_thread(rooms.prompts.build, request, patches)
        visual = await rooms.vision.embed(patches)
        reply = self._reply(request, prompt, rooms)
        return reply, _decode_request(reply.id, request, prompt, visual, rooms)

    async def _tokens(self, reply: Reply, request: DecodeRequest) -> AsyncGenerator[Token, None]:
        async with contextlib.aclosing(self._ready().decoder.decode(request)) as tokens:
            async for token in tokens:
                yield token
                if reply.finished:
                    return

    async def _chat(self, request: ChatRequest) -> ChatCompletion:
        with self._faults():
            reply, decode = await self._prepare(request)
            async with contextlib.aclosing(self._tokens(reply, decode)) as tokens:
                async for token in tokens:
                    reply.feed(token)
            return reply.completion()

    async def _stream(self, request: ChatRequest) -> AsyncGenerator[ChatCompletionChunk, None]:
        with self._faults():
            reply, decode = await self._prepare(request)
            yield reply.opening()
            async with contextlib.aclosing(self._tokens(reply, decode)) as tokens:
                async for token in tokens:
                    for chunk in reply.feed(token):
                        yield chunk
            for chunk in reply.closing():
                yield chunk

    def _admit(self, request: ChatRequest, rooms: Rooms) -> None:
        """Refuse what this model and this decoder cannot do, before any work is done."""
        if request.model not in {self.config.name, self.config.model, DEFAULT_MODEL}:
            raise ModelNotFound(
                f"The model {request.model!r} is not served here: ask for {self.config.name!r}.", param="model"
            )
        sampling = request.sampling()
        for name in sorted(sampling.asked() - rooms.decoder.honours):
            raise UnsupportedParameter(
                f"The decoder {rooms.decoder.name!r} cannot honour {name}: leave it out, or start the engine with"
                " another decoder.",
                param=name,
            )
        for name, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
            if unknown := [index for index in ids if index >= rooms.spec.vocab_size]:
                raise InvalidParameter(
                    f"{name} names the token {unknown[0]}, but the model's ids end at {rooms.spec.vocab_size - 1}.",
                    param=name,
                )

    def _reply(self, request: ChatRequest, prompt: Prompt, rooms: Rooms) -> Reply:
        counts = PromptCounts(
            prompt_tokens=len(prompt), image_tokens=prompt.image_tokens, video_tokens=prompt.video_tokens
        )
        return Reply(
            tokenizer=rooms.prompts.tokenizer,
            request=request,
            id=f"chatcmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self.config.name,
            counts=counts,
        )

    # The life of the engine

    def start(self) -> Self:
        """Load the model; returns when it can answer. Starting twice is allowed.

        Raises:
            SetupError: the configuration, the checkpoint, a plugin or a missing extra is in the way.
        """
        with self._life:
            if self._rooms is None:
                self._run_loop()
                try:
                    self._rooms = self._call(self._open())
                except BaseException:
                    self._stop_loop()
                    raise
        return self

    def close(self) -> None:
        """Free everything; running requests end with EngineClosed. Closing twice is allowed."""
        with self._life:
            rooms, self._rooms = self._rooms, None
            if rooms is not None:
                self._call(_close(rooms))
                self._stop_loop()

    async def astart(self) -> Self:
        """As `start`, without blocking the caller's event loop."""
        await asyncio.to_thread(self.start)
        return self

    async def aclose(self) -> None:
        """As `close`, without blocking the caller's event loop."""
        await asyncio.to_thread(self.close)

    def status(self) -> EngineStatus:
        rooms = self._rooms
        if rooms is None:
            return EngineStatus(state="closed", model=self.config.name)
        return EngineStatus(
            state="ready",
            model=self.config.name,
            decoder=rooms.decoder.name,
            decoder_reason=rooms.decoder_reason,
            max_model_len=rooms.prompts.max_model_len,
        )

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await self.astart()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _open(self) -> Rooms:
        config, registry = self.config, self._registry or load_plugins()
        folder = await asyncio.to_thread(find_model, config.model, registered=registry.models, revision=config.revision)
        architecture = registry.architecture(model_type(folder))
        spec = architecture.read(folder)
        factory, reason = choose_decoder(registry, spec, config)
        logger.info("model %s from %s, decoder %s: %s", config.name, folder, factory.name, reason)
        decoder = factory.create(spec, config)
        prompts = await asyncio.to_thread(PromptBuilder.load, spec, config, max_model_len=decoder.max_model_len)
        encoder = await asyncio.to_thread(architecture.load_vision, spec, device=config.device, dtype=config.dtype)
        await decoder.start()
        return Rooms(
            spec=spec,
            media=MediaLoader(config, list(registry.video_readers.values())),
            patcher=Patcher(spec.pixels, config),
            prompts=prompts,
            vision=VisionService(
                encoder, cache_bytes=config.vision_cache_mib * MIB, batch_patches=config.vision_batch_patches
            ),
            decoder=decoder,
            decoder_reason=reason,
        )

    # Ways in: from threads, and from other event loops

    def chat(self, request: Request) -> ChatCompletion:
        """Answer one request, blocking the caller's thread.

        Raises:
            RequestError: the request is wrong; `param` names the field.
            EngineError: the engine could not serve it now.
        """
        return self._call(self._chat(ChatRequest.parse(request)))

    async def achat(self, request: Request) -> ChatCompletion:
        """Answer one request; cancelling the caller frees everything that the request held. Raises as `chat`."""
        parsed = ChatRequest.parse(request)
        return await asyncio.wrap_future(self._submit(self._chat(parsed)))

    def stream(self, request: Request) -> Generator[ChatCompletionChunk, None, None]:
        """Answer one request piece by piece; closing the iterator cancels the rest. Raises as `chat`, at the first
        piece.
        """
        parsed = ChatRequest.parse(request)
        pieces: queue.SimpleQueue[ChatCompletionChunk | BaseException | None] = queue.SimpleQueue()
        future = self._submit(self._pump(parsed, pieces.put))
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            future.cancel()

    async def astream(self, request: Request) -> AsyncGenerator[ChatCompletionChunk, None]:
        """As `stream`, for callers on an event loop of their own."""
        parsed = ChatRequest.parse(request)
        caller = asyncio.get_running_loop()
        pieces: asyncio.Queue[ChatCompletionChunk | BaseException | None] = asyncio.Queue()
        put = pieces.put_nowait
        future = self._submit(self._pump(parsed, lambda piece: _hand_over(caller, put, piece)))
        try:
            while (piece := await pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            future.cancel()

    async def _pump(
        self, request: ChatRequest, put: Callable[[ChatCompletionChunk | BaseException | None], object]
    ) -> None:
        """Move a stream's pieces to another thread; None ends it, an exception is raised there."""
        try:
            async with contextlib.aclosing(self._stream(request)) as chunks:
                async for chunk in chunks:
                    put(chunk)
        except DashInferVLMError as error:
            put(error)
        else:
            put(None)

    # The engine's event loop

    def _ready(self) -> Rooms:
        if self._rooms is None:
            raise _closed()
        return self._rooms

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        loop = self._loop
        if loop is None:
            work.close()
            raise _closed()
        return asyncio.run_coroutine_threadsafe(work, loop)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._submit(work)
        try:
            return future.result()
        except BaseException:  # Ctrl-C in the caller's thread must not leave the request running
            future.cancel()
            raise

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """Where a request ends: what no room foresaw is logged here, and told to the caller without its inner
        details.
        """
        try:
            yield
        except DashInferVLMError:
            raise
        except asyncio.CancelledError:
            if self._rooms is None:
                raise _closed() from None
            raise
        except Exception as error:
            logger.exception("a request failed")
            raise EngineError(
                "The engine failed on this request; its log says why. Other requests are not affected.",
                code="internal_error",
            ) from error

    def _run_loop(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dashinfer-vlm-engine", daemon=True)
        self._thread.start()

    def _stop_loop(self) -> None:
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(_finish_tasks(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def choose_decoder(registry: Registry, spec: ModelSpec, config: EngineConfig) -> tuple[DecoderFactory, str]:
    """The decoder to use, and why.

    Raises:
        PluginError: no decoder of the name asked for is registered.
        SetupError: it cannot run here, or none can.
    """
    names = sorted(registry.decoders) if config.decoder == "auto" else [config.decoder]
    fits = [(registry.decoder(name).fitness(spec, config), registry.decoder(name)) for name in names]
    best, factory = max(fits, key=lambda fit: fit[0].score, default=(None, None))
    if best is None or factory is None or best.score <= 0:
        reasons = "; ".join(f"{factory.name}: {fitness.reason}" for fitness, factory in fits) or "none is registered"
        raise SetupError(f"No decoder can run here ({reasons}). `dashinfer-vlm plugins` lists what is installed.")
    return factory, best.reason


async def _cut(patcher: Patcher, media: Sequence[Media]) -> list[Patches]:
    return list(await asyncio.gather(*(asyncio.to_thread(patcher.cut, item) for item in media)))


def _decode_request(
    reply_id: str, request: ChatRequest, prompt: Prompt, visual: Sequence[VisualTokens], rooms: Rooms
) -> DecodeRequest:
    sampling = request.sampling()
    room = rooms.prompts.max_model_len - len(prompt)
    max_tokens = min(sampling.max_tokens or DEFAULT_MAX_TOKENS, room)
    return DecodeRequest(
        id=reply_id,
        token_ids=prompt.token_ids,
        positions=prompt.positions,
        spans=tuple(
            VisualSpan(start=span.start, tokens=tokens) for span, tokens in zip(prompt.spans, visual, strict=True)
        ),
        sampling=dataclasses.replace(sampling, max_tokens=max_tokens),
    )


async def _close(rooms: Rooms) -> None:
    await rooms.decoder.close()
    await rooms.vision.close()
    await rooms.media.close()


async def _finish_tasks() -> None:
    """End what still runs, so that every caller gets an answer before the loop goes."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()


def _hand_over(caller: asyncio.AbstractEventLoop, put: Callable[[Any], object], piece: object) -> None:
    with contextlib.suppress(
        RuntimeError
    ):  # the caller's loop is closed: nobody listens, and `future.cancel` is on its way
        caller.call_soon_threadsafe(put, piece)


def _closed() -> EngineClosed:
    return EngineClosed("The engine is not running: use it inside `with Engine(...)`, or call start() first.")
