"""Convert the engine's errors to LiteLLM's exceptions."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

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

HIDDEN_MESSAGE = "The model cannot be served. See the log of the proxy."
"""The message for clients of the proxy if its configuration is wrong."""


EXCEPTIONS: Mapping[type[DashInferVLMError], Callable[..., openai.APIError]] = {
    RequestError: exceptions.BadRequestError,
    UnsupportedParameter: exceptions.UnsupportedParamsError,
    ContextLengthExceeded: exceptions.ContextWindowExceededError,
    ModelNotFound: exceptions.NotFoundError,
    QueueFull: exceptions.RateLimitError,
    DeadlineExceeded: exceptions.Timeout,
    EngineClosed: exceptions.ServiceUnavailableError,
    DecoderFailed: exceptions.ServiceUnavailableError,
    EngineError: exceptions.InternalServerError,
    AccessDenied: exceptions.AuthenticationError,
    SetupError: exceptions.BadRequestError,  # the caller has chosen the model and its options
    DashInferVLMError: exceptions.InternalServerError,
}
"""The exception for each error class. Other classes have that of their nearest base class."""


def to_litellm_exception(
    error: DashInferVLMError, *, model: str, provider: str, api_base: str | None = None, hide_setup: bool
) -> openai.APIError:
    """Convert an error of the engine to LiteLLM's exception, with OpenAI's `param`, `code` and `type`.

    Args:
        error: the error.
        model: the model's name without the provider prefix.
        provider: the provider's name.
        api_base: the URL of the server. Setup errors name it: a Router with fallbacks hides which deployment failed.
        hide_setup: whether to hide setup errors and paths from a caller that did not set up the engine.
    """
    message = error.message if hide_setup else str(error)
    if api_base and isinstance(error, SetupError):
        message = f"{api_base}: {message}"
    param = error.param
    kind = next(kind for kind in type(error).__mro__ if kind in EXCEPTIONS)
    if hide_setup and isinstance(error, SetupError):
        logger.error("Request to %s/%s failed: %s", provider, model, message)
        message = HIDDEN_MESSAGE
        param = None
        # The request is valid: the Router tries another deployment, whose setup may be correct.
        kind = EngineError if kind is SetupError else kind
    options = _options(error, provider)
    exception = EXCEPTIONS[kind](message=message, model=model, llm_provider=provider, **options)
    exception.param = param
    exception.code = error.code
    if isinstance(exception, openai.BadRequestError | openai.NotFoundError):
        exception.type = "invalid_request_error"
    exception.body = {"message": message, "type": exception.type, "param": param, "code": error.code}
    return exception


def _options(error: DashInferVLMError, provider: str) -> dict[str, Any]:
    if isinstance(error, DeadlineExceeded):
        return {"exception_status_code": 504}  # the default, 408, would prevent fallbacks of streams
    if isinstance(error, QueueFull):  # LiteLLM's Router respects the header
        headers = {"retry-after": str(max(1, math.ceil(error.retry_after)))}
        request = httpx.Request("POST", f"https://{provider}.invalid")
        return {"response": httpx.Response(429, headers=headers, request=request)}
    return {}


@contextlib.contextmanager
def litellm_errors(*, model: str, provider: str, api_base: str | None, hide_setup: bool) -> Iterator[None]:
    """Convert the engine's errors to LiteLLM's exceptions."""
    try:
        yield
    except DashInferVLMError as error:
        raise to_litellm_exception(
            error, model=model, provider=provider, api_base=api_base, hide_setup=hide_setup
        ) from error
