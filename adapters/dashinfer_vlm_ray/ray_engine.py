"""The replicas of an application as one engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from dashinfer_vlm_core.engine import ChatEngine, EngineStatus
from dashinfer_vlm_core.engine.engine import parse_scores
from dashinfer_vlm_core.engine.observers import ObserverList, RequestObserver
from dashinfer_vlm_core.errors import DashInferVLMError, EngineClosed, QueueFull
from dashinfer_vlm_core.protocol import ChatRequest, EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest
from dashinfer_vlm_core.protocol.client import current_client
from dashinfer_vlm_core.protocol.ocr import OcrRequest

from .engine_replica import ReplicaReport, TokenCounts
from .session import pooling_session_id, session_id

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk
    from prometheus_client.core import Metric

    from dashinfer_vlm_core.engine import AnyOcrRequest, PoolingResult, Request, TokenEmbeddings
    from dashinfer_vlm_core.engine.capabilities import Capabilities
    from dashinfer_vlm_core.preprocessing.preview import Preview
    from dashinfer_vlm_core.protocol.client import Client
    from dashinfer_vlm_core.response.ocr import OcrChunk

logger: logging.Logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

REPORT_SECONDS = 5.0
"""Time between two reports of the replicas while one of them is ready."""

NOT_READY_SECONDS = 0.5
"""The same while none is ready."""

REPORT_TIMEOUT = 5.0


class RayEngine(ChatEngine):
    """Sends requests to the replicas of the engine deployment; implements `ChatEngine`.

    A request waits until a replica can serve it. There are no retries: a request that makes a replica crash must not
    make the next one crash too. Canceling a caller or closing a stream cancels the request on its replica.

    The replicas report their status and metrics periodically to `watch`; `status` returns the last report. Observers
    are notified of built prompts and decoded tokens only: replicas measure the rest.

    Args:
        handle: the handle of the engine deployment, such as `serve.get_deployment_handle("engine", "default")`.
        model: the name of the model.
    """

    def __init__(self, handle: Any, *, model: str) -> None:
        self._handle = handle
        self._observers = ObserverList()
        self._reports: Sequence[ReplicaReport] = ()
        self._status = EngineStatus(state="loading", model=model)

    # Requests

    def chat(self, request: Request) -> ChatCompletion:
        """Send one request and return the response; blocks the calling thread, which must not run an event loop.

        Raises:
            RequestError: the request is invalid; `param` names the field.
            EngineError: no replica could serve it.
        """
        parsed = ChatRequest.parse(request)
        client = current_client.get()
        with translate_errors():
            result: tuple[TokenCounts, ChatCompletion] = (
                self._method("chat", session_id(parsed, client)).remote(client, parsed).result()
            )
        return self._counted(result)

    async def achat(self, request: Request) -> ChatCompletion:
        """Send one request and return the response. Raises the same errors as `chat`."""
        result: tuple[TokenCounts, ChatCompletion] = await self._send("chat", ChatRequest.parse(request))
        return self._counted(result)

    def stream(self, request: Request) -> Iterator[ChatCompletionChunk]:
        """Stream the response to one request; closing the iterator cancels the request.

        Raises the same errors as `chat`, when a chunk is requested.
        """
        parsed = ChatRequest.parse(request)
        client = current_client.get()
        with translate_errors():
            chunks = self._method("stream", session_id(parsed, client), stream=True).remote(client, parsed)
            counted = TokenCounts()
            try:
                for counts, chunk in chunks:
                    counted = self._count(counted, counts)
                    yield chunk
            except GeneratorExit:
                chunks.cancel()
                raise

    async def astream(self, request: Request) -> AsyncGenerator[ChatCompletionChunk, None]:
        """Like `stream`, for callers on an event loop."""
        parsed = ChatRequest.parse(request)
        client = current_client.get()
        session = await asyncio.to_thread(session_id, parsed, client)
        async with contextlib.aclosing(self._stream("stream", session, client, parsed)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def aocr(self, request: AnyOcrRequest) -> AsyncGenerator[OcrChunk, None]:
        """Yield the pages of a document, all from one replica. Raises the same errors as `chat`."""
        parsed = OcrRequest.parse(request)
        async with contextlib.aclosing(self._stream("ocr", "", current_client.get(), parsed)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def aembed(self, request: EmbeddingRequest | Mapping[str, Any]) -> PoolingResult:
        """Return the embeddings of a request, all from one replica. Raises the same errors as `chat`."""
        embeddings: PoolingResult = await self._pool("embed", EmbeddingRequest.parse(request))
        return embeddings

    async def aembed_tokens(self, request: PoolingRequest | Mapping[str, Any]) -> TokenEmbeddings:
        """Return the embeddings of all tokens of each item, all from one replica. Raises the same errors as `chat`."""
        embeddings: TokenEmbeddings = await self._pool("embed_tokens", PoolingRequest.parse(request))
        return embeddings

    async def ascore(self, request: RerankRequest | ScoreRequest | Mapping[str, Any]) -> PoolingResult:
        """Return the probability that each document is relevant. Raises the same errors as `chat`."""
        scores: PoolingResult = await self._pool("score", parse_scores(request))
        return scores

    async def apreview(self, request: Request) -> Preview:
        """Return the media as the model would see them. Raises the same errors as `chat`."""
        preview: Preview = await self._send("preview", ChatRequest.parse(request))
        return preview

    async def atokenize(self, request: Request) -> list[int]:
        """Return the token ids of a request's prompt. Raises the same errors as `chat`."""
        ids: list[int] = await self._send("tokenize", ChatRequest.parse(request))
        return ids

    async def aencode(self, text: str) -> list[int]:
        """Return the token ids of a rendered prompt. Raises the same errors as `chat`."""
        ids: list[int] = await _result(self._method("encode").remote(text))
        return ids

    async def adecode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids. Raises the same errors as `chat`."""
        text: str = await _result(self._method("decode").remote(ids))
        return text

    async def aconvert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the tokens as written in the vocabulary. Raises the same errors as `chat`."""
        tokens: list[str] = await _result(self._method("convert_ids_to_tokens").remote(ids))
        return tokens

    # Status

    def status(self) -> EngineStatus:
        """Return the status of a replica that is ready, else of any, as of the last report."""
        return self._status

    def capabilities(self) -> Capabilities:
        """Return what the model supports, as of the last report."""
        return next((report.capabilities for report in self._reports), None) or super().capabilities()

    def add_observer(self, observer: RequestObserver) -> None:
        """Notify `observer` of the prompts and tokens of requests from now on."""
        self._observers.add(observer)

    def replica_metrics(self) -> Mapping[str, Iterable[Metric]]:
        """Return the last reported metrics of each replica by its name."""
        return {report.replica: report.metrics for report in self._reports}

    async def watch(self) -> None:
        """Request reports of all replicas until this task is canceled."""
        while True:
            try:
                await self.refresh()
            except DashInferVLMError as error:
                logger.debug("no replica reports: %s", error.message)
            except Exception:  # the next report may arrive
                logger.exception("The reports of the replicas could not be read.")
            await asyncio.sleep(REPORT_SECONDS if self._status.state == "ready" else NOT_READY_SECONDS)

    async def refresh(self) -> None:
        """Request a report of each replica now. The previous reports are kept if they do not respond in time.

        Raises:
            EngineClosed: Ray Serve cannot be reached.
        """
        from ray.serve.exceptions import DeploymentUnavailableError

        with translate_errors():
            try:
                reports = await self._handle.broadcast("report").results_async(
                    timeout_s=REPORT_TIMEOUT, return_exceptions=True
                )
            except TimeoutError:
                return
            except DeploymentUnavailableError:  # there is no replica now
                reports = []
        self._reports = [report for report in reports if isinstance(report, ReplicaReport)]
        combined = _combined(self._status, [report.status for report in self._reports])
        # Ray Serve's router can lose one of several calls that a request makes at a time: it finds waiting calls by the
        # internal ID of the request.
        self._status = replace(combined, max_parallel=1)

    async def _stream(
        self, method: str, session: str, client: Client, request: ChatRequest | OcrRequest
    ) -> AsyncGenerator[Any, None]:
        with translate_errors():
            chunks = self._method(method, session, stream=True).remote(client, request)
            counted = TokenCounts()
            try:
                async for counts, chunk in chunks:
                    counted = self._count(counted, counts)
                    yield chunk
            except (asyncio.CancelledError, GeneratorExit):
                chunks.cancel()
                raise

    async def _pool(self, method: str, request: EmbeddingRequest | RerankRequest | ScoreRequest) -> Any:
        client = current_client.get()
        session = await asyncio.to_thread(pooling_session_id, request, client)
        return self._counted(await _result(self._method(method, session).remote(client, request)))

    def _counted(self, result: tuple[TokenCounts, ResultT]) -> ResultT:
        self._count(TokenCounts(), result[0])
        return result[1]

    def _count(self, previous: TokenCounts, counts: TokenCounts) -> TokenCounts:
        if num_tokens := counts.prompt - previous.prompt:
            self._observers.prompt_built(num_tokens)
        for _ in range(counts.completion - previous.completion):
            self._observers.token_decoded()
        return counts

    def _method(self, name: str, session: str = "", *, stream: bool = False) -> Any:
        return self._handle.options(method_name=name, session_id=session, stream=stream)

    async def _send(self, method: str, request: ChatRequest) -> Any:
        client = current_client.get()
        session = await asyncio.to_thread(session_id, request, client)
        return await _result(self._method(method, session).remote(client, request))


async def _result(response: Any) -> Any:
    with translate_errors():
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise


def _combined(previous: EngineStatus, statuses: Sequence[EngineStatus]) -> EngineStatus:
    ready = next((status for status in statuses if status.state == "ready"), None)
    if ready or statuses:
        return ready or statuses[0]
    return previous if previous.state == "loading" else replace(previous, state="restarting")


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Raise the error that a replica raised, as the same class and without Ray's traceback in its message.

    Errors of Ray itself become `EngineClosed` or `QueueFull`. Unexpected exceptions of a replica are raised unchanged.
    """
    from ray.exceptions import RayError, RayTaskError
    from ray.serve.exceptions import BackPressureError, RayServeException

    try:
        yield
    except BackPressureError as error:
        raise QueueFull("Too many requests are waiting for a replica. Try again later.") from error
    except RayTaskError as error:
        if isinstance(error.cause, DashInferVLMError):
            raise error.cause from None
        raise
    except (RayError, RayServeException) as error:
        raise _replica_lost() from error
    except asyncio.CancelledError:
        if _is_canceled():
            raise
        raise _replica_lost() from None  # Ray raises it too if the replica was stopped, not the caller


def _replica_lost() -> EngineClosed:
    return EngineClosed("The replica that served the request has ended. Try again.", code="replica_lost")


def _is_canceled() -> bool:
    # Before Python 3.11, tasks do not know.
    count = getattr(asyncio.current_task(), "cancelling", None)  # codespell:ignore cancelling
    return count is None or count() > 0
