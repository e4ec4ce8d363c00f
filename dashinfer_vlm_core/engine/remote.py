"""An engine behind an address: the protocol `ChatEngine` over HTTP, against our server or another of OpenAI's kind."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

import httpx
import openai
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from .. import errors
from ..concurrency.loop import LoopThread
from ..errors import (
    AccessDenied,
    ConfigError,
    ContextLengthExceeded,
    DashInferVLMError,
    DeadlineExceeded,
    EngineClosed,
    EngineError,
    InvalidParameter,
    ModelNotFound,
    QueueFull,
)
from ..protocol import DEFAULT_MODEL, ChatRequest
from .engine import EngineStatus, Request, State

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

logger: logging.Logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
STATUS_SECONDS = 5.0

KIND_OF_CODE: Mapping[str, type[DashInferVLMError]] = MappingProxyType(
    {
        kind.code: kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, DashInferVLMError) and kind.code
    }
)
"""Our server says by `code` which error it was; others of its kind share some of these words."""

KIND_OF_STATUS: Mapping[int, type[DashInferVLMError]] = MappingProxyType(
    {
        401: AccessDenied,
        403: AccessDenied,
        404: ModelNotFound,
        408: DeadlineExceeded,
        429: QueueFull,
        502: EngineClosed,
        503: EngineClosed,
        504: DeadlineExceeded,
    }
)
"""What is left to go by where the code says nothing; others are InvalidParameter (4xx) and EngineError."""


STATES = frozenset(get_args(State))
DRAINING = "draining"
"""What a server of ours says that is about to end."""


class RemoteEngine:
    """Asks a server in place of an engine in this process; any number of threads, tasks and event loops may.

    Requests are sent as they are: what they may hold is for the server to say. Nothing is tried twice. Cancelling a
    caller, or closing a stream, closes the connection, which cancels the request on the server.

    Args:
        api_base: address up to and with `/v1`, such as `http://127.0.0.1:8000/v1`.
        api_key: sent as the bearer token, if there is one.
        model: for requests that name none.
        timeout: seconds without a byte from the server after which a request has failed.

    Raises:
        ConfigError: `api_base` is no http or https address.
    """

    def __init__(
        self, api_base: str, *, api_key: str | None = None, model: str | None = None, timeout: float = 600.0
    ) -> None:
        self.api_base: str = _checked(api_base)
        self.model = model
        self._http = openai.DefaultAsyncHttpxClient(
            timeout=httpx.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS)),
        )
        self._client = openai.AsyncOpenAI(
            base_url=self.api_base,
            api_key=api_key or "none",  # None would be filled from the environment: a key meant for somebody else
            max_retries=0,
            timeout=self._http.timeout,
            http_client=self._http,
        )
        self._client.organization = self._client.project = None  # from the environment too
        self._loop = LoopThread("dashinfer-vlm-remote")
        self._closed = False

    # Ask

    def chat(self, request: Request) -> ChatCompletion:
        """Answer one request, blocking the caller's thread.

        Raises:
            RequestError: the request is wrong; `param` names the field if the server does.
            EngineError: the server could not serve it now, or cannot be reached.
            AccessDenied: the server wants another key.
        """
        return self._loop.call(self._chat(request))

    async def achat(self, request: Request) -> ChatCompletion:
        """Answer one request; cancelling the caller cancels it on the server. Raises as `chat`."""
        return await self._loop.acall(self._chat(request))

    def stream(self, request: Request) -> Generator[ChatCompletionChunk, None, None]:
        """Answer one request chunk by chunk; closing the iterator cancels the rest.

        Raises as `chat`, when a chunk is taken.
        """
        yield from self._loop.iterate(self._stream(request))

    async def astream(self, request: Request) -> AsyncGenerator[ChatCompletionChunk, None]:
        """As `stream`, for callers on an event loop of their own."""
        async with contextlib.aclosing(self._loop.aiterate(self._stream(request))) as chunks:
            async for chunk in chunks:
                yield chunk

    def status(self) -> EngineStatus:
        """What the server says about itself; `failed` with the reason while it does not."""
        return self._loop.call(self._status())

    # Close

    def close(self) -> None:
        """Close the connections; running requests end with EngineClosed. Closing twice is allowed."""
        if not self._closed:
            self._closed = True
            self._loop.stop(last=self._client.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _chat(self, request: Request) -> ChatCompletion:
        with _faults():
            answer = await self._client.post(
                "/chat/completions", cast_to=ChatCompletion, body=self._body(request, stream=False)
            )
            if not isinstance(answer, ChatCompletion) or not answer.choices:
                raise _no_openai()
            return answer

    async def _stream(self, request: Request) -> AsyncGenerator[ChatCompletionChunk, None]:
        finished = False
        with _faults():
            chunks = await self._client.post(
                "/chat/completions",
                cast_to=ChatCompletion,
                body=self._body(request, stream=True),
                stream=True,
                stream_cls=openai.AsyncStream[ChatCompletionChunk],
            )
            async with chunks:
                async for chunk in chunks:
                    finished = finished or any(choice.finish_reason for choice in chunk.choices)
                    yield chunk
            if not finished:
                raise EngineError("The server ended the stream before the answer was complete. Try again.")

    async def _status(self) -> EngineStatus:
        try:
            with _faults():
                return _told(await self._health()) or await self._models()
        except DashInferVLMError as error:
            return EngineStatus(state="failed", model=self.model or "", fatal_error=error.message)

    async def _health(self) -> Any:
        """What our own server says at `/health`, ready or not; None if another one answers."""
        url = self.api_base.removesuffix("/v1") + "/health"
        response = await self._http.get(url, timeout=STATUS_SECONDS)
        with contextlib.suppress(ValueError):
            return response.json()
        return None

    async def _models(self) -> EngineStatus:
        models = (await self._client.models.list(timeout=STATUS_SECONDS)).data
        served = next((model for model in models if model.id == self.model), models[0] if models else None)
        if served is None:
            raise EngineError("The server has no model.")
        length = getattr(served, "max_model_len", None)  # vLLM's and SGLang's servers tell it here
        return EngineStatus(state="ready", model=served.id, max_model_len=length if isinstance(length, int) else 0)

    def _body(self, request: Request, *, stream: bool) -> dict[str, Any]:
        if isinstance(request, ChatRequest):
            request = request.model_dump(mode="json", exclude_unset=True)
        return {"model": self.model or DEFAULT_MODEL, **request, "stream": stream}


def error_from_response(error: openai.APIError) -> DashInferVLMError:
    """The error of our tree that a server's answer stands for."""
    if isinstance(error, openai.APITimeoutError):
        return DeadlineExceeded("The server did not answer in time.")
    if isinstance(error, openai.APIConnectionError):
        return _unreachable()
    body = error.body if isinstance(error.body, Mapping) else {}
    message = str(body.get("message") or "The server refused the request without saying why.")
    code = error.code if isinstance(error.code, str) else None
    return _made(_kind(error, code), message, error, code)


def _kind(error: openai.APIError, code: str | None) -> type[DashInferVLMError]:
    if code is not None and code in KIND_OF_CODE:
        return KIND_OF_CODE[code]
    status = error.status_code if isinstance(error, openai.APIStatusError) else 500
    return KIND_OF_STATUS.get(status, InvalidParameter if status < 500 else EngineError)


def _made(kind: type[DashInferVLMError], message: str, error: openai.APIError, code: str | None) -> DashInferVLMError:
    if issubclass(kind, ContextLengthExceeded):
        return kind(message, param=error.param or "messages")
    if issubclass(kind, QueueFull):
        return kind(message, retry_after=_retry_after(error))
    return kind(message, param=error.param, code=code)


def _retry_after(error: openai.APIError) -> float:
    header = error.response.headers.get("retry-after", "") if isinstance(error, openai.APIStatusError) else ""
    return float(header) if header.isdecimal() else 1.0


def _told(health: Any) -> EngineStatus | None:
    """The status that our server's `/health` holds; None if it is another server's."""
    if not isinstance(health, dict) or health.get("status") not in {*STATES, DRAINING}:
        return None
    return EngineStatus(
        state="closed" if health["status"] == DRAINING else health["status"],
        model=str(health.get("model", "")),
        decoder=str(health.get("decoder", "")),
        decoder_reason=str(health.get("reason", "")),
        max_model_len=int(health.get("max_model_len", 0)),
        fatal_error=str(health.get("fatal_error") or health.get("trouble", "")),
    )


@contextlib.contextmanager
def _faults() -> Iterator[None]:
    """The errors of two libraries, as ours."""
    try:
        yield
    except openai.APIError as error:
        logger.debug("the server answered with an error", exc_info=True)
        raise error_from_response(error) from error
    except httpx.HTTPError as error:  # in the midst of a stream the client lets them through
        logger.debug("the connection broke off", exc_info=True)
        raise _unreachable() from error


def _unreachable() -> EngineClosed:
    return EngineClosed("The server cannot be reached, or broke the connection off.", code="connection_error")


def _no_openai() -> EngineError:
    return EngineError("The server does not answer as OpenAI's API does: check `api_base`, which ends with /v1.")


def _checked(api_base: str) -> str:
    url = httpx.URL(api_base)
    if url.scheme not in {"http", "https"} or not url.host:
        raise ConfigError("`api_base` must be an http or https address, such as http://127.0.0.1:8000/v1.")
    return api_base.rstrip("/")
