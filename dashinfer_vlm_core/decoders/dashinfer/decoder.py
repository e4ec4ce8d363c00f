"""The DashInfer decoder as the engine sees it: it keeps a worker process running, and hands requests to it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ...concurrency.compute import CPU_EXECUTOR
from ...config import EngineConfig
from ...errors import DecoderFailed, EngineClosed, EngineError, QueueFull, SetupError, UnsupportedParameter
from ...models.spec import ModelSpec
from ..interface import DecodeRequest, FinishReason, Token, VisualSpan, check_request
from .convert import Converted, convert
from .environment import cuda_devices, find_environment
from .options import HONOURED_ON_CPU, HONOURED_ON_CUDA, check_sampling, generate_config, stop_tokens
from .plan import check_salt, make_plan
from .process import LOG_MARK, WorkerDied, WorkerProcess

if TYPE_CHECKING:
    import numpy.typing as npt

    from .environment import Environment

    Array: TypeAlias = npt.NDArray[np.generic]

logger: logging.Logger = logging.getLogger(__name__)

STARTS = 5
"""How often in a row a worker may die before it is ready, until it is given up on."""

FIRST_PAUSE = 0.1
"""Seconds before a worker that did not start is tried again; doubled each time."""

ENDS = 2
"""The engine counts two tokens more than prompt and answer have."""

BLIND = (
    "DashInfer on a CPU ignores the rows and columns of pictures (M-RoPE), so that answers about them would be wrong:"
    " use the decoder `torch`, or set approximate_vision to accept that."
)

Step: TypeAlias = tuple[int, "tuple[float, list[tuple[int, float]]] | None", int]


@dataclass(eq=False, slots=True)
class _Run:
    """One request in the worker.

    Attributes:
        inbox: its tokens as (id, logprobs, cached prompt tokens), or the error that ends it.
        released: whether the engine has forgotten it.
    """

    number: int
    request: DecodeRequest
    inbox: asyncio.Queue[Step | EngineError] = field(default_factory=asyncio.Queue)
    released: bool = False


class DashInferDecoder:
    """Decodes in DashInfer's engine; implements `dashinfer_vlm_core.decoders.Decoder`. Belongs to one event loop.

    The engine runs in a worker process under its own interpreter. Should that die, the requests in it fail, and are
    retryable; those that wait go to the next worker, which is started at once. One that has requests and says nothing
    for `EngineConfig.step_timeout` is killed. A worker that dies at its start `STARTS` times in a row is given up on.

    Attributes:
        restarts: how often a worker was replaced after it had been ready.
        pid: of the worker; None while there is none.
    """

    name = "dashinfer"

    def __init__(self, spec: ModelSpec, config: EngineConfig) -> None:
        self._spec = spec
        self._config = config
        self._environment = find_environment(config)
        self._plan = make_plan(
            spec,
            config,
            cuda=cuda_devices(),
            cpu_only=self._environment.cpu_only,
        )
        self.max_model_len: int = self._plan.max_model_len
        self.honours: frozenset[str] = HONOURED_ON_CPU if self._plan.on_cpu else HONOURED_ON_CUDA
        self.blind = BLIND if self._plan.on_cpu and not config.approximate_vision else ""
        self.trouble: str = ""
        self.restarts: int = 0
        self._worker: WorkerProcess | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._places = asyncio.Semaphore(self._plan.places)
        self._waiting = 0
        self._runs: dict[int, _Run] = {}
        self._numbers = 0
        self._heard = 0.0
        self._closed = False

    @property
    def pid(self) -> int | None:
        return self._worker.pid if self._worker else None

    async def start(self) -> None:
        if self._keeper is not None:
            return
        environment = self._environment
        cache = self._config.cache_folder / "models"
        model = await asyncio.to_thread(convert, self._spec, self._plan.form, environment=environment, cache=cache)
        self._keeper = asyncio.create_task(self._keep(environment, model), name="dashinfer-keeper")
        await self._settled.wait()
        if self._worker is None:
            await self.close()
            raise SetupError(self.trouble)

    async def close(self) -> None:
        self._closed = True
        if self._keeper is not None and not self._keeper.done():
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        self._settled.set()

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[Token, None]:
        self._check(request)
        arrays = await asyncio.to_thread(_arrays, request) if request.spans else _arrays(request)
        await self._take_place()
        run = self._enter(request, arrays)
        try:
            async for token in self._tokens(run):
                yield token
        finally:
            self._leave(run)

    def _check(self, request: DecodeRequest) -> None:
        """No value reaches the engine that it might not survive."""
        if self._keeper is None or self._closed:
            raise EngineClosed("The decoder is not running. Start the engine first.")
        check_request(request, self._spec, max_model_len=self.max_model_len)
        check_salt(request.salt, self._plan)
        check_sampling(request.sampling)
        if unsupported := sorted(request.sampling.asked() - self.honours):
            raise UnsupportedParameter(f"DashInfer cannot honour {unsupported[0]} here.", param=unsupported[0])
        if request.spans and self.blind:
            raise UnsupportedParameter(self.blind, param="messages")

    # Places: who may be in the engine

    async def _take_place(self) -> None:
        """Wait for a place in a worker that is ready."""
        if self._places.locked() and self._waiting >= self._config.max_waiting:
            raise QueueFull(f"{self._waiting} requests wait already. Try again in a second.")
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
        try:
            await self._settled.wait()
            if self._worker is None:
                raise EngineClosed(_CLOSED) if self._closed else DecoderFailed(self.trouble)
        except BaseException:
            self._places.release()
            raise

    def _enter(self, request: DecodeRequest, arrays: list[Array]) -> _Run:
        """Send the request to the worker; from here on, `_release` alone gives its place back."""
        assert self._worker is not None
        if not self._runs:
            self._heard = asyncio.get_running_loop().time()
        self._numbers += 1
        run = self._runs[self._numbers] = _Run(self._numbers, request)
        keys = [int(request.token_ids[span.start]) for span in request.spans]
        options = generate_config(request, self._spec)
        self._worker.send({"do": "start", "id": run.number, "options": options, "keys": keys}, arrays)
        return run

    def _leave(self, run: _Run) -> None:
        """Its reader has gone; if the engine has not finished it by itself, it stops it within a step."""
        if not run.released and self._worker is not None:
            self._worker.send({"do": "stop", "id": run.number})

    def _release(self, run: _Run) -> None:
        run.released = True
        del self._runs[run.number]
        self._places.release()

    # Tokens

    async def _tokens(self, run: _Run) -> AsyncGenerator[Token, None]:
        sampling = run.request.sampling
        stops = stop_tokens(sampling, self._spec)
        count = 0
        while True:
            step = await run.inbox.get()
            if isinstance(step, EngineError):
                raise step
            token, logprobs, cached = step
            count += 1
            finish: FinishReason | None = (
                "stop" if token in stops else "length" if count == sampling.max_tokens else None
            )
            logprob, top = logprobs or (None, [])
            alternatives = tuple((index, value) for index, value in top[: sampling.logprobs or 0])
            yield Token(id=token, logprob=logprob, top=alternatives, finish=finish, cached=cached if count == 1 else 0)
            if finish:
                return

    def _book(self, frame: dict[str, Any]) -> None:
        """What the worker says, into the inboxes. A run that is unknown was released already."""
        if frame["is"] == "tokens":
            for number, ids, logprobs, cached in frame["of"]:
                run = self._runs[number]
                for token, listed in zip(ids, logprobs or [None] * len(ids), strict=True):
                    run.inbox.put_nowait((token, listed, cached))
            return
        run = self._runs[frame["id"]]
        if frame["is"] == "failed":
            logger.error("Request %s failed in DashInfer: %s", run.request.id, frame["why"])
        run.inbox.put_nowait(DecoderFailed("The decoder failed on this request; the engine's log has the cause."))
        if frame["is"] == "released":
            self._release(run)

    # The worker's life

    async def _keep(self, environment: Environment, model: Converted) -> None:
        """Keep a worker running until we are cancelled, or it is given up on."""
        try:
            while (worker := await self._launch(environment, model)) is not None:
                await self._serve(worker)
                self.restarts += 1
            logger.error("%s", self.trouble)
        except Exception:
            self.trouble = "The decoder failed, and its log has the cause. Start the engine again."
            logger.exception("the keeper of DashInfer's worker failed")
        finally:
            self._end_runs(EngineClosed(_CLOSED) if self._closed else DecoderFailed(self.trouble))
            self._settled.set()

    async def _launch(self, environment: Environment, model: Converted) -> WorkerProcess | None:
        """A worker that is ready; None, and `trouble`, if it died too often."""
        died = ""
        for attempt in range(STARTS):
            if attempt:
                await asyncio.sleep(FIRST_PAUSE * 2 ** (attempt - 1))
            try:
                worker = await WorkerProcess.launch(environment, self._arguments(model))
            except WorkerDied as error:
                died = str(error)
                logger.warning("DashInfer's worker died at its start, %d of %d: %s", attempt + 1, STARTS, died)
            else:
                logger.info(
                    "DashInfer %s is ready on %s, process %d", worker.version, self._plan.compute_unit, worker.pid
                )
                return worker
        how = died.partition(LOG_MARK)[0]
        self.trouble = (
            f"DashInfer's worker died at its start {STARTS} times in a row ({how}); the log has its last words."
        )
        return None

    def _arguments(self, model: Converted) -> dict[str, Any]:
        return {
            "model_path": str(model.graph),
            "weights_path": str(model.weights),
            "compute_unit": self._plan.compute_unit,
            "engine_max_length": self.max_model_len + ENDS,
            "engine_max_batch": self._plan.places,
            "enable_prefix_cache": self._plan.prefix_cache,
        }

    async def _serve(self, worker: WorkerProcess) -> None:
        """Until the worker dies; then nothing of it is left, and its requests have failed."""
        self._worker = worker
        self._settled.set()
        watch = asyncio.create_task(self._watch(worker), name="dashinfer-watch")
        try:
            async for frame in worker.frames():
                self._heard = asyncio.get_running_loop().time()
                self._book(frame)
        except WorkerDied as error:
            logger.warning("DashInfer's worker died with %d requests: %s", len(self._runs), error)
        finally:
            watch.cancel()
            self._worker = None
            self._settled.clear()
            await worker.close()
            self._end_runs(EngineClosed(_CLOSED) if self._closed else DecoderFailed(_DIED))

    async def _watch(self, worker: WorkerProcess) -> None:
        """Kill a worker that has requests and says nothing: it is replaced as any other that died."""
        patience, silence = self._config.step_timeout, 0.0
        while silence < patience:
            await asyncio.sleep(patience - silence)
            silence = asyncio.get_running_loop().time() - self._heard if self._runs else 0.0
        logger.error(
            "DashInfer's worker has said nothing for %g seconds, with %d requests: it is killed.",
            patience,
            len(self._runs),
        )
        worker.kill()

    def _end_runs(self, error: EngineError) -> None:
        for run in list(self._runs.values()):
            run.inbox.put_nowait(error)
            self._release(run)


_CLOSED = "The decoder was closed. Start the engine again."
_DIED = "The decoder's process died while the request ran; it is being restarted. Try again."


def _name(span: VisualSpan) -> bytes:
    """32 bytes that name the rows of a span: the item's digest if they are all of it."""
    digest, rows = span.tokens.digest, span.stop - span.start
    if rows == len(span.tokens.embedding):
        return digest
    return hashlib.sha256(f"{span.row} {rows} ".encode() + digest).digest()


def _arrays(request: DecodeRequest) -> list[Array]:
    """What the worker's `start` takes. Visual tokens may come from another device: this waits for it."""
    arrays: list[Array] = [np.ascontiguousarray(request.token_ids[np.newaxis], dtype=np.int64)]
    if request.spans:
        arrays.append(np.ascontiguousarray(request.positions[:, np.newaxis], dtype=np.int32))
    for span in request.spans:
        rows = span.tokens.embedding[span.row : span.row + span.stop - span.start]
        embedding = CPU_EXECUTOR.run(rows.detach().float).cpu().numpy()
        arrays += [np.ascontiguousarray(embedding), np.frombuffer(_name(span), dtype=np.int32)]
    return arrays
