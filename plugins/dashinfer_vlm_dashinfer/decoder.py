"""The DashInfer decoder: runs a worker process and sends requests to it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from dashinfer_vlm_core.concurrency.compute import CPU_EXECUTOR
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.decoders.interface import (
    Decoder,
    DecodeRequest,
    FinishReason,
    RequestNotStarted,
    Token,
    VisualSpan,
    check_request,
)
from dashinfer_vlm_core.errors import (
    DecoderFailed,
    EngineClosed,
    EngineError,
    QueueFull,
    SetupError,
    UnsupportedParameter,
)
from dashinfer_vlm_core.kernels.devices import cuda_devices
from dashinfer_vlm_core.models.spec import ModelSpec

from .convert import ConvertedModel, convert
from .environment import find_environment
from .options import SUPPORTED_ON_CPU, SUPPORTED_ON_CUDA, check_sampling, generate_config, stop_tokens
from .plan import check_cache_salt, make_plan
from .process import WorkerDied, WorkerProcess

if TYPE_CHECKING:
    import numpy.typing as npt

    Array: TypeAlias = npt.NDArray[np.generic]

logger: logging.Logger = logging.getLogger(__name__)

EXTRA_TOKENS = 2
"""DashInfer counts two tokens more than prompt and output have."""

UNSUPPORTED_VISION_REASON = (
    "DashInfer on a CPU ignores the rows and columns of images (M-RoPE), so responses about them would be wrong. Use"
    " the decoder `torch`."
)

Step: TypeAlias = tuple[int, "tuple[float, list[tuple[int, float]]] | None", int]


@dataclass(eq=False, slots=True)
class _ActiveRequest:
    """A request that the worker decodes.

    Attributes:
        outputs: its tokens as (id, logprobs, cached prompt tokens), the error that ends it, or None if the worker sends
            no more of them.
        released: whether DashInfer has released it.
    """

    number: int
    request: DecodeRequest
    outputs: asyncio.Queue[Step | EngineError | None] = field(default_factory=asyncio.Queue)
    released: bool = False


class DashInferDecoder(Decoder):
    """Decodes with DashInfer; implements `dashinfer_vlm_core.decoders.Decoder`. Belongs to one event loop.

    DashInfer runs in a worker process under its own interpreter. If the process dies, `fatal_error` is set, running
    requests fail with a retryable error, and waiting requests are left to the next decoder. A worker that has requests
    and sends nothing for `Limits.step_timeout` is killed.

    Attributes:
        pid: the worker's process id; None while there is no worker.
    """

    name = "dashinfer"
    fatal_error: str = ""

    def __init__(self, spec: ModelSpec, config: EngineConfig) -> None:
        self._spec = spec
        self._config = config
        self._environment = find_environment(config)
        self._plan = make_plan(spec, config, cuda=cuda_devices(), cpu_only=self._environment.cpu_only)
        self.max_model_len: int = self._plan.max_model_len
        self.supported_params: frozenset[str] = SUPPORTED_ON_CPU if self._plan.on_cpu else SUPPORTED_ON_CUDA
        self.unsupported_vision_reason = UNSUPPORTED_VISION_REASON if self._plan.on_cpu else ""
        self._worker: WorkerProcess | None = None
        self._serving: asyncio.Task[None] | None = None
        self._slots = asyncio.Semaphore(self._plan.max_batch_size)
        self._waiting = 0
        self._active: dict[int, _ActiveRequest] = {}
        self._num_requests = 0
        self._last_frame_at = 0.0
        self._closed = False

    @property
    def pid(self) -> int | None:
        return self._worker.pid if self._worker else None

    async def start(self) -> None:
        if self._serving is not None:
            return
        cache = self._config.cache_folder / "models"
        model = await asyncio.to_thread(
            convert, self._spec, self._plan.weight_format, environment=self._environment, cache=cache
        )
        try:
            worker = await WorkerProcess.launch(self._environment, self._arguments(model))
        except WorkerDied as error:
            raise SetupError(
                f"DashInfer's worker died during startup ({error}). See the log for its last output."
            ) from error
        logger.info("DashInfer %s is ready on %s, process %d", worker.version, self._plan.compute_unit, worker.pid)
        self._worker = worker
        self._serving = asyncio.create_task(self._serve(worker), name="dashinfer-worker")

    async def close(self) -> None:
        self._closed = True
        if self._serving is not None and not self._serving.done():
            if self._worker is not None:  # otherwise it is already ending the worker, and must not be interrupted
                self._serving.cancel()
            await asyncio.wait([self._serving])
        await self._end()  # a task that is canceled before its first step has not ended the worker

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[Token, None]:
        self._check(request)
        arrays = await self._acquire_slot(request)
        active = self._submit(request, arrays)
        try:
            async for token in self._tokens(active):
                yield token
        finally:
            self._cancel(active)

    def _check(self, request: DecodeRequest) -> None:
        # Every value that might crash DashInfer is rejected here.
        if self.fatal_error:
            raise RequestNotStarted
        if self._serving is None or self._closed:
            raise EngineClosed("The decoder is not running. Start the engine first.")
        check_request(request, self._spec, max_model_len=self.max_model_len)
        check_cache_salt(request.cache_salt, self._plan)
        check_sampling(request.sampling)
        if unsupported := sorted(request.sampling.requested_params() - self.supported_params):
            raise UnsupportedParameter(
                f"DashInfer does not support {unsupported[0]} here. Remove it.", param=unsupported[0]
            )
        if request.spans and self.unsupported_vision_reason:
            raise UnsupportedParameter(self.unsupported_vision_reason, param="messages")

    # Slots: admission to DashInfer

    async def _acquire_slot(self, request: DecodeRequest) -> list[Array]:
        """Return the arrays of a request when a slot is free. A full queue rejects it before they are copied."""
        if self._slots.locked() and self._waiting >= self._config.max_waiting:
            raise QueueFull(f"{self._waiting} requests are already waiting. Try again in a second.")
        self._waiting += 1
        try:
            arrays = await asyncio.to_thread(_arrays, request) if request.spans else _arrays(request)
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        if self._worker is None:
            self._slots.release()
            raise RequestNotStarted if self.fatal_error else EngineClosed(_CLOSED)
        return arrays

    def _submit(self, request: DecodeRequest, arrays: list[Array]) -> _ActiveRequest:
        # From here on, only `_release` releases the slot.
        assert self._worker is not None
        if not self._active:
            self._last_frame_at = asyncio.get_running_loop().time()
        self._num_requests += 1
        active = self._active[self._num_requests] = _ActiveRequest(self._num_requests, request)
        keys = [int(request.token_ids[span.start]) for span in request.spans]
        options = generate_config(request, self._spec)
        self._worker.send({"do": "start", "id": active.number, "options": options, "keys": keys}, arrays)
        return active

    def _cancel(self, active: _ActiveRequest) -> None:
        if not active.released and self._worker is not None:
            self._worker.send({"do": "stop", "id": active.number})

    def _release(self, active: _ActiveRequest) -> None:
        active.released = True
        del self._active[active.number]
        self._slots.release()

    # Tokens

    async def _tokens(self, active: _ActiveRequest) -> AsyncGenerator[Token, None]:
        sampling = active.request.sampling
        stops = stop_tokens(sampling, self._spec)
        count = 0
        while True:
            step = await active.outputs.get()
            if isinstance(step, EngineError):
                raise step
            if step is None:
                raise DecoderFailed("The decoder failed on this request; see the engine's log for the cause.")
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

    def _handle_frame(self, frame: dict[str, Any]) -> None:
        if frame["is"] == "tokens":
            for number, ids, logprobs, cached in frame["of"]:
                active = self._active[number]
                for token, listed in zip(ids, logprobs or [None] * len(ids), strict=True):
                    active.outputs.put_nowait((token, listed, cached))
            return
        active = self._active[frame["id"]]
        if frame["is"] == "failed":
            logger.error("Request %s failed in DashInfer: %s", active.request.id, frame["why"])
        active.outputs.put_nowait(None)
        if frame["is"] == "released":
            self._release(active)

    # Lifecycle of the worker

    def _arguments(self, model: ConvertedModel) -> dict[str, Any]:
        return {
            "model_path": str(model.graph),
            "weights_path": str(model.weights),
            "compute_unit": self._plan.compute_unit,
            "engine_max_length": self.max_model_len + EXTRA_TOKENS,
            "engine_max_batch": self._plan.max_batch_size,
            "enable_prefix_cache": self._plan.prefix_cache,
        }

    async def _serve(self, worker: WorkerProcess) -> None:
        watchdog = asyncio.create_task(self._kill_if_hung(worker), name="dashinfer-watchdog")
        try:
            while True:
                frame = await worker.receive()
                self._last_frame_at = asyncio.get_running_loop().time()
                self._handle_frame(frame)
        except WorkerDied as error:
            self.fatal_error = f"DashInfer's worker died ({error}). See the log for its last output."
        except Exception:
            self.fatal_error = "DashInfer's worker sent an invalid frame. See the log for the cause."
            logger.exception("Invalid frame from DashInfer's worker")
        finally:
            watchdog.cancel()
            await self._end()

    async def _end(self) -> None:
        worker = self._worker
        if worker is None:
            return
        self._worker = None
        try:
            await worker.close()
        finally:
            closed = self._closed and not self.fatal_error
            for active in list(self._active.values()):
                active.outputs.put_nowait(EngineClosed(_CLOSED) if closed else DecoderFailed(_DIED))
                self._release(active)

    async def _kill_if_hung(self, worker: WorkerProcess) -> None:
        timeout = self._config.limits.step_timeout
        silence = 0.0
        while silence < timeout:
            await asyncio.sleep(timeout - silence)
            silence = asyncio.get_running_loop().time() - self._last_frame_at if self._active else 0.0
        logger.error("Killing DashInfer's worker: it has requests, but has sent nothing for %g seconds.", timeout)
        worker.kill()


_CLOSED = "The decoder was closed. Start the engine again."
_DIED = "The decoder's process died. Try again in a moment."


def _span_digest(span: VisualSpan, request: DecodeRequest) -> bytes:
    """Return a digest of all that the keys and values of a span depend on: DashInfer's prefix cache compares no
    positions, and a video without some of its temporal patches has others than a whole one with the same content."""
    rows = span.stop - span.start
    positions = np.ascontiguousarray(request.positions[:, span.start : span.stop], dtype=np.int32)
    return hashlib.sha256(f"{span.row} {rows} ".encode() + span.tokens.digest + positions.tobytes()).digest()


def _arrays(request: DecodeRequest) -> list[Array]:
    arrays: list[Array] = [np.ascontiguousarray(request.token_ids[np.newaxis], dtype=np.int64)]
    if request.spans:
        arrays.append(np.ascontiguousarray(request.positions[:, np.newaxis], dtype=np.int32))
    for span in request.spans:
        rows = span.tokens.embedding[span.row : span.row + span.stop - span.start]
        embedding = CPU_EXECUTOR.run(rows.detach().float).cpu().numpy()
        arrays += [np.ascontiguousarray(embedding), np.frombuffer(_span_digest(span, request), dtype=np.int32)]
    return arrays
