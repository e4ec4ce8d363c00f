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
from ...kernels.devices import cuda_devices
from ...models.spec import ModelSpec
from ..interface import DecodeRequest, FinishReason, RequestNotStarted, Token, VisualSpan, check_request
from .convert import ConvertedModel, convert
from .environment import find_environment
from .options import SUPPORTED_ON_CPU, SUPPORTED_ON_CUDA, check_sampling, generate_config, stop_tokens
from .plan import check_cache_salt, make_plan
from .process import LOG_MARK, WorkerDied, WorkerProcess
from .settings import DashInferOptions

if TYPE_CHECKING:
    import numpy.typing as npt

    Array: TypeAlias = npt.NDArray[np.generic]

logger: logging.Logger = logging.getLogger(__name__)

ENDS = 2
"""The engine counts two tokens more than prompt and answer have."""

UNSUPPORTED_VISION_REASON = (
    "DashInfer on a CPU ignores the rows and columns of pictures (M-RoPE), so that answers about them would be wrong:"
    " use the decoder `torch`, or set approximate_vision to accept that."
)

Step: TypeAlias = tuple[int, "tuple[float, list[tuple[int, float]]] | None", int]


@dataclass(eq=False, slots=True)
class _ActiveRequest:
    """One request in the worker.

    Attributes:
        inbox: its tokens as (id, logprobs, cached prompt tokens), or the error that ends it.
        released: whether the engine has forgotten it.
    """

    number: int
    request: DecodeRequest
    outputs: asyncio.Queue[Step | EngineError] = field(default_factory=asyncio.Queue)
    released: bool = False


class DashInferDecoder:
    """Decodes in DashInfer's engine; implements `dashinfer_vlm_core.decoders.Decoder`. Belongs to one event loop.

    The engine runs in a worker process under its own interpreter. Should that die, the decoder is in `trouble`: the
    requests in it fail, and are retryable; those that wait are left to the next decoder. A worker that has requests and
    says nothing for `EngineConfig.step_timeout` is killed.

    Attributes:
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
        self.supported_params: frozenset[str] = SUPPORTED_ON_CPU if self._plan.on_cpu else SUPPORTED_ON_CUDA
        self.unsupported_vision_reason = (
            UNSUPPORTED_VISION_REASON
            if self._plan.on_cpu and not config.options_of(DashInferOptions).approximate_vision
            else ""
        )
        self.fatal_error: str = ""
        self._worker: WorkerProcess | None = None
        self._serving: asyncio.Task[None] | None = None
        self._places = asyncio.Semaphore(self._plan.max_batch_size)
        self._waiting = 0
        self._runs: dict[int, _ActiveRequest] = {}
        self._numbers = 0
        self._heard = 0.0
        self._closed = False

    @property
    def pid(self) -> int | None:
        return self._worker.pid if self._worker else None

    async def start(self) -> None:
        if self._serving is not None:
            return
        environment, cache = self._environment, self._config.cache_folder / "models"
        model = await asyncio.to_thread(convert, self._spec, self._plan.form, environment=environment, cache=cache)
        try:
            worker = await WorkerProcess.launch(environment, self._arguments(model))
        except WorkerDied as error:
            logger.warning("DashInfer's worker died at its start: %s", error)
            raise SetupError(
                f"DashInfer's worker died at its start ({_how(error)}); the log has its last words."
            ) from error
        logger.info("DashInfer %s is ready on %s, process %d", worker.version, self._plan.compute_unit, worker.pid)
        self._worker = worker
        self._serving = asyncio.create_task(self._serve(worker), name="dashinfer-worker")

    async def close(self) -> None:
        self._closed = True
        if self._serving is not None and not self._serving.done():
            if self._worker is not None:  # else it is ending the worker, and cannot be interrupted in that
                self._serving.cancel()
            await asyncio.wait([self._serving])
        await self._end()  # a task that is cancelled before its first step has ended nothing

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[Token, None]:
        self._check(request)
        arrays = await asyncio.to_thread(_arrays, request) if request.spans else _arrays(request)
        await self._acquire_slot()
        run = self._enter(request, arrays)
        try:
            async for token in self._tokens(run):
                yield token
        finally:
            self._leave(run)

    def _check(self, request: DecodeRequest) -> None:
        """No value reaches the engine that it might not survive."""
        if self.fatal_error:
            raise RequestNotStarted
        if self._serving is None or self._closed:
            raise EngineClosed("The decoder is not running. Start the engine first.")
        check_request(request, self._spec, max_model_len=self.max_model_len)
        check_cache_salt(request.cache_salt, self._plan)
        check_sampling(request.sampling)
        if unsupported := sorted(request.sampling.requested_params() - self.supported_params):
            raise UnsupportedParameter(f"DashInfer cannot honour {unsupported[0]} here.", param=unsupported[0])
        if request.spans and self.unsupported_vision_reason:
            raise UnsupportedParameter(self.unsupported_vision_reason, param="messages")

    # Places: who may be in the engine

    async def _acquire_slot(self) -> None:
        """Wait for a place in the worker."""
        if self._places.locked() and self._waiting >= self._config.max_waiting:
            raise QueueFull(f"{self._waiting} requests wait already. Try again in a second.")
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
        if self._worker is None:
            self._places.release()
            raise RequestNotStarted if self.fatal_error else EngineClosed(_CLOSED)

    def _enter(self, request: DecodeRequest, arrays: list[Array]) -> _ActiveRequest:
        """Send the request to the worker; from here on, `_release` alone gives its place back."""
        assert self._worker is not None
        if not self._runs:
            self._heard = asyncio.get_running_loop().time()
        self._numbers += 1
        run = self._runs[self._numbers] = _ActiveRequest(self._numbers, request)
        keys = [int(request.token_ids[span.start]) for span in request.spans]
        options = generate_config(request, self._spec)
        self._worker.send({"do": "start", "id": run.number, "options": options, "keys": keys}, arrays)
        return run

    def _leave(self, run: _ActiveRequest) -> None:
        """Its reader has gone; if the engine has not finished it by itself, it stops it within a step."""
        if not run.released and self._worker is not None:
            self._worker.send({"do": "stop", "id": run.number})

    def _release(self, run: _ActiveRequest) -> None:
        run.released = True
        del self._runs[run.number]
        self._places.release()

    # Tokens

    async def _tokens(self, run: _ActiveRequest) -> AsyncGenerator[Token, None]:
        sampling = run.request.sampling
        stops = stop_tokens(sampling, self._spec)
        count = 0
        while True:
            step = await run.outputs.get()
            if isinstance(step, EngineError):
                raise step
            token, logprobs, cached = step
            count += 1
            finish: FinishReason | None = (
                "stop" if token in stops else "length" if count == sampling.max_tokens else None
            )
            logprob, top = logprobs or (None, [])
            alternatives = tuple((index, value) for index, value in top[: sampling.logprobs or 0])
            yield Token(
                id=token,
                logprob=logprob,
                top_logprobs=alternatives,
                finish_reason=finish,
                cached_tokens=cached if count == 1 else 0,
            )
            if finish:
                return

    def _book(self, frame: dict[str, Any]) -> None:
        """What the worker says, into the inboxes. A run that is unknown was released already."""
        if frame["is"] == "tokens":
            for number, ids, logprobs, cached in frame["of"]:
                run = self._runs[number]
                for token, listed in zip(ids, logprobs or [None] * len(ids), strict=True):
                    run.outputs.put_nowait((token, listed, cached))
            return
        run = self._runs[frame["id"]]
        if frame["is"] == "failed":
            logger.error("Request %s failed in DashInfer: %s", run.request.id, frame["why"])
        run.outputs.put_nowait(DecoderFailed("The decoder failed on this request; the engine's log has the cause."))
        if frame["is"] == "released":
            self._release(run)

    # The worker's life

    def _arguments(self, model: ConvertedModel) -> dict[str, Any]:
        return {
            "model_path": str(model.graph),
            "weights_path": str(model.weights),
            "compute_unit": self._plan.compute_unit,
            "engine_max_length": self.max_model_len + ENDS,
            "engine_max_batch": self._plan.max_batch_size,
            "enable_prefix_cache": self._plan.prefix_cache,
        }

    async def _serve(self, worker: WorkerProcess) -> None:
        """Until the worker dies, or we are cancelled; then nothing of it is left, and its requests have failed."""
        watch = asyncio.create_task(self._watch(worker), name="dashinfer-watch")
        try:
            async for frame in worker.frames():
                self._heard = asyncio.get_running_loop().time()
                self._book(frame)
        except WorkerDied as error:
            self.fatal_error = f"DashInfer's worker died ({_how(error)}); the log has its last words."
            logger.warning("DashInfer's worker died with %d requests: %s", len(self._runs), error)
        except Exception:
            self.fatal_error = "DashInfer's worker said what nobody understands; the log has the cause."
            logger.exception("what DashInfer's worker sent was not understood")
        finally:
            watch.cancel()
            await self._end()

    async def _end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        try:
            await worker.close()
        finally:
            self._end_runs(EngineClosed(_CLOSED) if self._closed and not self.fatal_error else DecoderFailed(_DIED))

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
            run.outputs.put_nowait(error)
            self._release(run)


_CLOSED = "The decoder was closed. Start the engine again."
_DIED = "The decoder's process died. Try again in a moment."


def _how(death: WorkerDied) -> str:
    """What is known of it, without the worker's log."""
    return str(death).partition(LOG_MARK)[0]


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
