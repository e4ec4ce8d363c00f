"""Convert the engine's errors to LiteLLM's exceptions."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TypeAlias

import httpx
import openai
from litellm import exceptions

from dashinfer_vlm_core.errors import (
    AccessDenied,
    ContextLengthExceeded,
    DashInferVLMError,
    DeadlineExceeded,
    DecoderFailed,
    EngineClosed,
    EngineError,
    ModelNotFound,
    QueueFull,
    RequestError,
    SetupError,
    UnsupportedParameter,
)

logger: logging.Logger = logging.getLogger(__name__)

_ExceptionFactory: TypeAlias = Callable[[DashInferVLMError, str, str, str], openai.APIError]

HIDDEN_MESSAGE = "The model cannot be served. See the log of the proxy."
"""The message for clients of the proxy if its configuration is wrong."""


def _factory(kind: Callable[..., openai.APIError]) -> _ExceptionFactory:
    return lambda _error, message, model, provider: kind(message=message, model=model, llm_provider=provider)


def _timeout(_error: DashInferVLMError, message: str, model: str, provider: str) -> openai.APIError:
    """Use status 504 like our server. LiteLLM's default 408 would prevent fallbacks of streams."""
    return exceptions.Timeout(message=message, model=model, llm_provider=provider, exception_status_code=504)


def _rate_limit(error: DashInferVLMError, message: str, model: str, provider: str) -> openai.APIError:
    """Add the `retry-after` header, which LiteLLM's Router respects."""
    assert isinstance(error, QueueFull)
    response = httpx.Response(
        429,
        headers={"retry-after": str(max(1, math.ceil(error.retry_after)))},
        request=httpx.Request("POST", f"https://{provider}.invalid"),
    )
    return exceptions.RateLimitError(message=message, model=model, llm_provider=provider, response=response)


FACTORIES: Mapping[type[DashInferVLMError], _ExceptionFactory] = MappingProxyType(
    {
        RequestError: _factory(exceptions.BadRequestError),
        UnsupportedParameter: _factory(exceptions.UnsupportedParamsError),
        ContextLengthExceeded: _factory(exceptions.ContextWindowExceededError),
        ModelNotFound: _factory(exceptions.NotFoundError),
        QueueFull: _rate_limit,
        DeadlineExceeded: _timeout,
        EngineClosed: _factory(exceptions.ServiceUnavailableError),
        DecoderFailed: _factory(exceptions.ServiceUnavailableError),
        EngineError: _factory(exceptions.InternalServerError),
        AccessDenied: _factory(exceptions.AuthenticationError),
        SetupError: _factory(exceptions.BadRequestError),  # the caller has chosen the model and its options
        DashInferVLMError: _factory(exceptions.InternalServerError),
    }
)
"""The factory for each error class. Other classes use that of their nearest base class."""


def to_litellm_exception(error: DashInferVLMError, *, model: str, provider: str, hide_setup: bool) -> openai.APIError:
    """Convert an error of the engine to LiteLLM's exception, with OpenAI's `param`, `code` and `type`.

    Args:
        error: the error.
        model: the model's name without the provider prefix.
        provider: the provider's name.
        hide_setup: whether to hide setup errors and paths from a caller that did not set up the engine.
    """
    message, param = error.message if hide_setup else str(error), error.param
    kind = next(kind for kind in type(error).__mro__ if kind in FACTORIES)
    if hide_setup and isinstance(error, SetupError):
        logger.error("Request failed: %s", error.message)
        message, param = HIDDEN_MESSAGE, None
        # The request is valid: the Router tries another deployment, whose setup may be correct.
        kind = EngineError if kind is SetupError else kind
    exception = FACTORIES[kind](error, message, model, provider)
    exception.param, exception.code = param, error.code
    if isinstance(exception, openai.BadRequestError | openai.NotFoundError):
        exception.type = "invalid_request_error"
    exception.body = {"message": message, "type": exception.type, "param": param, "code": error.code}
    return exception


@contextlib.contextmanager
def litellm_errors(*, model: str, provider: str, hide_setup: bool) -> Iterator[None]:
    """Convert the engine's errors to LiteLLM's exceptions."""
    try:
        yield
    except DashInferVLMError as error:
        raise to_litellm_exception(error, model=model, provider=provider, hide_setup=hide_setup) from error
