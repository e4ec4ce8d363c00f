"""A remote engine: the protocol `ChatEngine` over HTTP, for our server and other OpenAI-compatible ones."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import httpx
import numpy as np
import numpy.typing as npt
import openai
import pydantic
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
    UnsupportedParameter,
)
from ..protocol import DEFAULT_MODEL, ChatRequest, EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest
from ..protocol.client import current_client
from ..protocol.ocr import OcrRequest
from ..protocol.pooling import PoolingBody
from ..response.ocr import OcrChunk
from .engine import AnyOcrRequest, EngineStatus, LoopEngine, Request, parse_scores
from .late_interaction import TokenEmbeddings
from .observers import ObserverList, RequestObserver
from .pooling_pipeline import PoolingResult

if TYPE_CHECKING:
    from typing_extensions import Self

logger: logging.Logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
STATUS_SECONDS = 5.0

ERROR_CLASS_BY_CODE: Mapping[str, type[DashInferVLMError]] = {
    error_class.code: error_class
    for error_class in vars(errors).values()
    if isinstance(error_class, type) and issubclass(error_class, DashInferVLMError) and error_class.code
}
"""Error classes by `code`, which our server sends. Other OpenAI-compatible servers send some of the codes too."""

ERROR_CLASS_BY_STATUS: Mapping[int, type[DashInferVLMError]] = {
    401: AccessDenied,
    403: AccessDenied,
    404: ModelNotFound,
    408: DeadlineExceeded,
    429: QueueFull,
    502: EngineClosed,
    503: EngineClosed,
    504: DeadlineExceeded,
}
"""Error classes by HTTP status, for unknown codes; other statuses are InvalidParameter (4xx) or EngineError."""


DRAINING = "draining"
"""The status that our server reports while it shuts down."""

_STATUS = pydantic.TypeAdapter(EngineStatus)


class RemoteEngine(LoopEngine):
    """Sends requests to a server instead of an engine in this process; safe for concurrent threads and event loops.

    Requests are sent unchanged, except for `cache_salt`, which the client's cache namespace is joined with. The server
    validates them. There are no retries. Canceling a caller or closing a stream closes the connection, which cancels
    the request on the server. Observers are notified of built prompts and decoded tokens only.

    Args:
        api_base: the URL up to and including `/v1`, such as `http://127.0.0.1:8000/v1`.
        api_key: sent as the bearer token if given.
        model: the model of requests that name none.
        timeout: seconds without data from the server after which a request fails.

    Raises:
        ConfigError: `api_base` is not an http or https URL.
    """

    def __init__(
        self, api_base: str, *, api_key: str | None = None, model: str | None = None, timeout: float = 600.0
    ) -> None:
        self.api_base: str = _check_api_base(api_base)
        self.model = model
        self._root = self.api_base.removesuffix("/v1")
        self._client = openai.AsyncOpenAI(
            base_url=self.api_base,
            api_key=api_key or "none",  # None would be replaced from the environment, by a key for another service
            max_retries=0,
            timeout=openai.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS)),
        )
        self._client.organization = self._client.project = None  # set from the environment too
        self._loop_thread = LoopThread("dashinfer-vlm-remote")
        self._observers = ObserverList()
        self._closed = False

    @property
    def _loop(self) -> LoopThread:
        return self._loop_thread

    async def atokenize(self, request: Request) -> list[int]:
        """Return the token ids of a request's prompt, with placeholders for images and videos.

        The server must have `/tokenize`, in vLLM's format. Raises the same errors as `chat`.
        """
        body = self._body(request, stream=False)
        body.pop("stream_options", None)  # of a request whose response is streamed
        return await self._loop.acall(self._tokenize(body))

    async def aencode(self, text: str) -> list[int]:
        """Return the token ids of a text, in which special tokens are recognized.

        Raises the same errors as `atokenize`.
        """
        body = {"prompt": text, "model": self.model} if self.model else {"prompt": text}
        return await self._loop.acall(self._tokenize(body))

    async def aembed(self, request: EmbeddingRequest | Mapping[str, Any]) -> PoolingResult:
        """Return the embeddings of a request, with the tokens of all prompts together.

        Raises the same errors as `chat`.
        """
        return await self._loop.acall(self._embed(EmbeddingRequest.parse(request)))

    async def aembed_tokens(self, request: PoolingRequest | Mapping[str, Any]) -> TokenEmbeddings:
        """Return the embeddings of all tokens of each item, with the tokens of all prompts together.

        Raises the same errors as `chat`.
        """
        return await self._loop.acall(self._embed_tokens(PoolingRequest.parse(request)))

    async def ascore(self, request: RerankRequest | ScoreRequest | Mapping[str, Any]) -> PoolingResult:
        """Return how relevant each document is, with the tokens of all pairs together.

        Raises the same errors as `chat`.
        """
        return await self._loop.acall(self._score(parse_scores(request)))

    def add_observer(self, observer: RequestObserver) -> None:
        """Notify `observer` of the prompts and tokens of requests from now on."""
        self._observers.add(observer)

    def status(self) -> EngineStatus:
        """Return the status that the server reports; `failed`, with the reason, if it does not respond."""
        return self._loop.call(self._status())

    # Close

    def close(self) -> None:
        """Close the connections; running requests raise EngineClosed. Calling it again has no effect."""
        if not self._closed:
            self._closed = True
            self._loop.stop(cleanup=self._client.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def _chat(self, request: Request) -> ChatCompletion:
        with _translate_errors():
            completion = await self._client.post(
                "/chat/completions", cast_to=ChatCompletion, body=self._body(request, stream=False)
            )
            if not isinstance(completion, ChatCompletion) or not completion.choices:
                raise _not_compatible()
            if completion.usage:
                self._observers.prompt_built(completion.usage.prompt_tokens)
                for _ in range(completion.usage.completion_tokens):
                    self._observers.token_decoded()
            return completion

    async def _stream(self, request: Request) -> AsyncGenerator[ChatCompletionChunk, None]:
        finished = False
        counted = 0
        with _translate_errors():
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
                    # A chunk counts as one token until the usage is known, which is sent last, and only on request.
                    if chunk.usage and not chunk.choices:
                        self._observers.prompt_built(chunk.usage.total_tokens - counted)
                    else:
                        counted += 1
                        self._observers.token_decoded()
                    yield chunk
            if not finished:
                raise _incomplete_stream()

    async def _ocr(self, request: AnyOcrRequest) -> AsyncGenerator[OcrChunk, None]:
        body = OcrRequest.parse(request).model_dump(mode="json", exclude_unset=True)
        body = {"model": self.model or DEFAULT_MODEL, **body, "stream": True}
        with _translate_errors("/v1/ocr", "read documents"):
            events = await self._client.post(
                "/ocr", cast_to=object, body=body, stream=True, stream_cls=openai.AsyncStream[object]
            )
            count = total = 0
            async with events:
                async for event in events:
                    chunk = OcrChunk.model_validate(event)
                    count += 1
                    total = chunk.total_pages
                    yield chunk
            if count < max(total, 1):
                raise _incomplete_stream()

    async def _tokenize(self, body: dict[str, Any]) -> list[int]:
        with _translate_errors("/tokenize", "count tokens"):
            found = await self._client.post(f"{self._root}/tokenize", cast_to=object, body=body)
        return _read(_Tokens, found).tokens

    async def _embed(self, request: EmbeddingRequest) -> PoolingResult:
        body = self._pooling_body(request) | {"encoding_format": "base64"}
        with _translate_errors("/v1/embeddings", "compute embeddings"):
            found = await self._client.post("/embeddings", cast_to=object, body=body)
        response = _read(_Embeddings, found)
        vectors = [row.vector() for row in _in_order(response.data, len(request.inputs) or 1)]
        if len({len(vector) for vector in vectors}) > 1:
            raise _not_compatible()
        return response.result(self.model, np.stack(vectors))

    async def _embed_tokens(self, request: PoolingRequest) -> TokenEmbeddings:
        body = self._pooling_body(request) | {"task": "token_embed", "encoding_format": "float"}
        with _translate_errors("/pooling", "embed tokens"):
            found = await self._client.post(f"{self._root}/pooling", cast_to=object, body=body)
        response = _read(_Pooled, found)
        items = _in_order(response.data, len(request.inputs) or 1)
        if len({len(row) for item in items for row in item.data}) != 1:
            raise _not_compatible()
        return TokenEmbeddings(
            model=response.model or self.model or "",
            vectors=tuple(np.array(item.data, np.float32) for item in items),
            prompt_tokens=(response.usage.prompt_tokens,),
        )

    async def _score(self, request: RerankRequest | ScoreRequest) -> PoolingResult:
        body = self._pooling_body(request)
        if isinstance(request, ScoreRequest):
            with _translate_errors("/score", "score documents"):
                found = await self._client.post(f"{self._root}/score", cast_to=object, body=body)
            response: _Scores | _Ranks = _read(_Scores, found)
        else:
            body = {**body, "return_documents": False}
            body.pop("top_n", None)  # all scores are returned, in the order of the documents
            with _translate_errors("/v1/rerank", "score documents"):
                found = await self._client.post("/rerank", cast_to=object, body=body)
            response = _read(_Ranks, found)
        scores = [row.score for row in _in_order(response.rows, len(request.pairs))]
        return response.result(self.model, np.array(scores, np.float32))

    def _pooling_body(self, request: PoolingBody) -> dict[str, Any]:
        return self._with_cache_salt(request.model_dump(mode="json", exclude_unset=True, by_alias=True))

    async def _status(self) -> EngineStatus:
        try:
            with _translate_errors():
                return _status_from_health(await self._health()) or await self._models()
        except DashInferVLMError as error:
            return EngineStatus(state="failed", model=self.model or "", fatal_error=error.message)

    async def _health(self) -> object:
        try:
            return await self._get(f"{self._root}/health")
        except openai.APIStatusError as error:  # our server is not ready, or another one has no `/health`
            return error.body

    async def _models(self) -> EngineStatus:
        try:
            listed = _ModelList.model_validate(await self._get("/models")).data
        except pydantic.ValidationError as error:
            raise _not_compatible() from error
        if not listed:
            raise EngineError("The server lists no model at `/models`. Load one there, or check `api_base`.")
        model = next((model for model in listed if model.id == self.model), listed[0])
        return EngineStatus(state="ready", model=model.id, max_model_len=model.max_model_len or 0)

    async def _get(self, path: str) -> object:
        return await self._client.get(path, cast_to=object, options={"timeout": STATUS_SECONDS})

    def _body(self, request: Request, *, stream: bool) -> dict[str, Any]:
        if isinstance(request, ChatRequest):
            if request.raw_prompt is not None:
                raise UnsupportedParameter(
                    "This engine forwards requests to another server, which renders the prompt. Send messages, or send"
                    " the prompt to that server's `/v1/completions`.",
                    param="prompt",
                )
            request = request.model_dump(mode="json", exclude_unset=True)
        return self._with_cache_salt({**request, "stream": stream})

    def _with_cache_salt(self, request: Mapping[str, Any]) -> dict[str, Any]:
        body = {"model": self.model or DEFAULT_MODEL, **request}
        given = body.get("cache_salt")
        if isinstance(given, str | None) and (cache_salt := current_client.get().effective_cache_salt(given)):
            body["cache_salt"] = cache_salt
        return body


def error_from_response(error: openai.APIError | httpx.HTTPError) -> DashInferVLMError:
    """Return the error of our tree that corresponds to a server's error response, or to a failed connection."""
    if isinstance(error, openai.APITimeoutError | httpx.TimeoutException):
        return DeadlineExceeded("The server did not respond in time.")
    if isinstance(error, openai.APIConnectionError | httpx.HTTPError):
        return EngineClosed(
            "The server cannot be reached, or closed the connection. Check `api_base`, and that a server such as"
            " `dashinfer-vlm serve` is running there.",
            code="connection_error",
        )
    body = error.body if isinstance(error.body, Mapping) else {}
    message = str(body.get("message") or "The server rejected the request without a message.")
    code = error.code if isinstance(error.code, str) else None
    error_class = _error_class(error, code)
    if issubclass(error_class, ContextLengthExceeded):
        return error_class(message, param=error.param or "messages")
    if issubclass(error_class, QueueFull):
        return error_class(message, retry_after=_retry_after(error))
    return error_class(message, param=error.param, code=code)


def _error_class(error: openai.APIError, code: str | None) -> type[DashInferVLMError]:
    if code is not None and code in ERROR_CLASS_BY_CODE:
        return ERROR_CLASS_BY_CODE[code]
    status = error.status_code if isinstance(error, openai.APIStatusError) else 500
    return ERROR_CLASS_BY_STATUS.get(status, InvalidParameter if status < 500 else EngineError)


def _retry_after(error: openai.APIError) -> float:
    header = error.response.headers.get("retry-after", "") if isinstance(error, openai.APIStatusError) else ""
    return float(header) if header.isdecimal() else 1.0


class _ServedModel(pydantic.BaseModel):
    """A model at `/models`; vLLM's and SGLang's servers report the length there."""

    id: str
    max_model_len: int | None = None


class _ModelList(pydantic.BaseModel):
    data: list[_ServedModel]


def _status_from_health(health: object) -> EngineStatus | None:
    if not isinstance(health, dict):
        return None
    state = health.get("status")
    try:
        return _STATUS.validate_python({"model": "", **health, "state": "closed" if state == DRAINING else state})
    except pydantic.ValidationError:  # it is from another server
        return None


class _Usage(pydantic.BaseModel):
    prompt_tokens: int = 0


class _PoolingResponse(pydantic.BaseModel):
    model: str = ""
    usage: _Usage = _Usage()

    def result(self, model: str | None, values: npt.NDArray[np.float32]) -> PoolingResult:
        return PoolingResult(
            model=self.model or model or "",
            values=values,
            prompt_tokens=(self.usage.prompt_tokens,),
            cached_tokens=0,
        )


class _Row(pydantic.BaseModel):
    index: int


class _Embedding(_Row):
    """An embedding: float32 in little-endian order as base64, or numbers from servers without `encoding_format`."""

    embedding: pydantic.Base64Bytes | list[float]

    def vector(self) -> npt.NDArray[np.float32]:
        given = self.embedding
        if isinstance(given, bytes) and len(given) % 4:
            raise _not_compatible()
        return np.frombuffer(given, "<f4") if isinstance(given, bytes) else np.array(given, np.float32)


class _Embeddings(_PoolingResponse):
    data: Annotated[list[_Embedding], pydantic.Field(min_length=1)]


class _Matrix(_Row):
    data: Annotated[list[list[float]], pydantic.Field(min_length=1)]


class _Pooled(_PoolingResponse):
    data: Annotated[list[_Matrix], pydantic.Field(min_length=1)]


class _Score(_Row):
    score: float = pydantic.Field(validation_alias=pydantic.AliasChoices("score", "relevance_score"))


class _Scores(_PoolingResponse):
    rows: list[_Score] = pydantic.Field(alias="data")


class _Ranks(_PoolingResponse):
    rows: list[_Score] = pydantic.Field(alias="results")


class _Tokens(pydantic.BaseModel):
    tokens: list[int]


ResponseT = TypeVar("ResponseT", bound=pydantic.BaseModel)


RowT = TypeVar("RowT", bound=_Row)


def _in_order(rows: Sequence[RowT], count: int) -> list[RowT]:
    ordered = sorted(rows, key=lambda row: row.index)
    if [row.index for row in ordered] != list(range(count)):
        raise _not_compatible()
    return ordered


def _read(kind: type[ResponseT], found: object) -> ResponseT:
    try:
        return kind.model_validate(found)
    except pydantic.ValidationError as error:
        raise _not_compatible() from error


@contextlib.contextmanager
def _translate_errors(route: str = "", work: str = "") -> Iterator[None]:
    """Translate the errors of openai to ours, those of httpx that openai 2 raises while a stream is read, and those of
    what is read.

    Args:
        route: a route that servers may lack.
        work: what they cannot do then.
    """
    try:
        yield
    except (openai.APIError, httpx.HTTPError) as error:
        logger.debug("the request to the server failed", exc_info=True)
        if route and isinstance(error, openai.NotFoundError) and error.code != ModelNotFound.code:
            raise UnsupportedParameter(f"The server has no `{route}`, so it cannot {work}.") from error
        raise error_from_response(error) from error
    except (pydantic.ValidationError, json.JSONDecodeError) as error:
        raise _not_compatible() from error


def _incomplete_stream() -> EngineError:
    return EngineError("The server ended the stream before the response was complete. Try again.")


def _not_compatible() -> EngineError:
    return EngineError("The server's response does not follow OpenAI's API. Check that `api_base` ends with /v1.")


def _check_api_base(api_base: str) -> str:
    url = httpx.URL(api_base)
    if url.scheme not in {"http", "https"} or not url.host:
        raise ConfigError("`api_base` must be an http or https URL, such as http://127.0.0.1:8000/v1.")
    return api_base.rstrip("/")
