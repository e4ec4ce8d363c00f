"""Errors as LiteLLM's users know them: each kind of error is one of LiteLLM's classes."""

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

_Make: TypeAlias = Callable[[DashInferVLMError, str, str, str], openai.APIError]

HIDDEN = "The model cannot be served now; the proxy's log says why."
"""What a client of the proxy is told about the set-up of its operator."""


def _plain(kind: Callable[..., openai.APIError]) -> _Make:
    return lambda _error, message, model, provider: kind(message=message, model=model, llm_provider=provider)


def _timeout(_error: DashInferVLMError, message: str, model: str, provider: str) -> openai.APIError:
    """With 504, as our server answers: a stream that ends with LiteLLM's own 408 would have no fallback."""
    return exceptions.Timeout(message=message, model=model, llm_provider=provider, exception_status_code=504)


def _rate_limit(error: DashInferVLMError, message: str, model: str, provider: str) -> openai.APIError:
    """With the header that the Router waits by."""
    assert isinstance(error, QueueFull)
    response = httpx.Response(
        429,
        headers={"retry-after": str(max(1, math.ceil(error.retry_after)))},
        request=httpx.Request("POST", f"https://{provider}.invalid"),
    )
    return exceptions.RateLimitError(message=message, model=model, llm_provider=provider, response=response)


CLASSES: Mapping[type[DashInferVLMError], _Make] = MappingProxyType(
    {
        RequestError: _plain(exceptions.BadRequestError),
        UnsupportedParameter: _plain(exceptions.UnsupportedParamsError),
        ContextLengthExceeded: _plain(exceptions.ContextWindowExceededError),
        ModelNotFound: _plain(exceptions.NotFoundError),
        QueueFull: _rate_limit,
        DeadlineExceeded: _timeout,
        EngineClosed: _plain(exceptions.ServiceUnavailableError),
        DecoderFailed: _plain(exceptions.ServiceUnavailableError),
        EngineError: _plain(exceptions.InternalServerError),
        AccessDenied: _plain(exceptions.AuthenticationError),
        SetupError: _plain(exceptions.BadRequestError),  # who calls has chosen the model and its options
        DashInferVLMError: _plain(exceptions.InternalServerError),
    }
)
"""How each error is made; one that is not listed is made as its nearest base."""


def as_litellm(error: DashInferVLMError, *, model: str, provider: str, hide_setup: bool) -> openai.APIError:
    """The error of LiteLLM that stands for one of ours; `param`, `code` and `type` are those of OpenAI's body.

    Args:
        error: ours.
        model: as the caller named it, without the provider.
        provider: its name.
        hide_setup: whether the caller is not the one who set the engine up, and is not to see its paths.
    """
    message, param = error.message, error.param
    kind = next(kind for kind in type(error).__mro__ if kind in CLASSES)
    if hide_setup and isinstance(error, SetupError):
        logger.error("a request failed: %s", error.message)
        message, param = HIDDEN, None
        # No fault of the request: the Router tries another deployment, which may be set up better.
        kind = EngineError if kind is SetupError else kind
    made = CLASSES[kind](error, message, model, provider)
    made.param, made.code = param, error.code
    made.type = (
        "invalid_request_error" if isinstance(made, openai.BadRequestError | openai.NotFoundError) else made.type
    )
    made.body = {"message": message, "type": made.type, "param": param, "code": error.code}
    return made


@contextlib.contextmanager
def litellm_errors(*, model: str, provider: str, hide_setup: bool) -> Iterator[None]:
    """Raise LiteLLM's errors in place of ours."""
    try:
        yield
    except DashInferVLMError as error:
        raise as_litellm(error, model=model, provider=provider, hide_setup=hide_setup) from error
