"""Conversion of the engine's errors to LiteLLM's exceptions."""

from __future__ import annotations

from pathlib import Path

import litellm

from dashinfer_vlm_core import errors
from dashinfer_vlm_litellm.errors import HIDDEN_MESSAGE, to_litellm_exception
from tests.cases import cases

CLASSES = {
    errors.RequestError: litellm.BadRequestError,
    errors.InvalidParameter: litellm.BadRequestError,
    errors.UnsupportedParameter: litellm.UnsupportedParamsError,
    errors.ContextLengthExceeded: litellm.ContextWindowExceededError,
    errors.ModelNotFound: litellm.NotFoundError,
    errors.MediaError: litellm.BadRequestError,
    errors.MediaRefused: litellm.BadRequestError,
    errors.MediaTooLarge: litellm.BadRequestError,
    errors.MediaUnreachable: litellm.BadRequestError,
    errors.MediaUndecodable: litellm.BadRequestError,
    errors.EngineError: litellm.InternalServerError,
    errors.QueueFull: litellm.RateLimitError,
    errors.DeadlineExceeded: litellm.Timeout,
    errors.EngineClosed: litellm.ServiceUnavailableError,
    errors.DecoderFailed: litellm.ServiceUnavailableError,
    errors.SetupError: litellm.BadRequestError,
    errors.ConfigError: litellm.BadRequestError,
    errors.CheckpointError: litellm.BadRequestError,
    errors.MissingDependency: litellm.BadRequestError,
    errors.AccessDenied: litellm.AuthenticationError,
    errors.PluginError: litellm.BadRequestError,
}


def subclasses(kind):
    return {kind}.union(*(subclasses(child) for child in kind.__subclasses__()))


def convert(error, *, proxied=False):
    return to_litellm_exception(error, model="m", provider="p", hide_setup=proxied)


def test_every_error_has_litellm_class():
    assert subclasses(errors.DashInferVLMError) - {errors.DashInferVLMError} == CLASSES.keys()
    assert {kind: type(convert(kind("Wrong."))) for kind in CLASSES} == CLASSES


@cases("kind", CLASSES)
def test_router_retries_errors_not_caused_by_request(kind):
    """Errors that the request did not cause: another deployment of the proxy may have a correct setup."""
    error = convert(kind("Wrong."), proxied=True)
    retried = litellm.should_retry(error.status_code) or isinstance(error, litellm.AuthenticationError)
    assert retried is not issubclass(kind, errors.RequestError)


def test_setup_error_is_bad_request_for_calling_program():
    error = convert(errors.ConfigError("`max_model_len` is wrong.", param="max_model_len"))
    assert (type(error), error.type, error.param) == (litellm.BadRequestError, "invalid_request_error", "max_model_len")
    assert error.message == "litellm.BadRequestError: `max_model_len` is wrong."
    assert not litellm.should_retry(error.status_code)
    hidden = convert(errors.ConfigError("`max_model_len` is wrong.", param="max_model_len"), proxied=True)
    assert (type(hidden), hidden.param) == (litellm.InternalServerError, None)


def test_setup_error_names_the_deployment(caplog):
    """A Router with fallbacks responds as if nothing had failed."""
    error, base = errors.AccessDenied("Send a key."), "http://127.0.0.1:8000/v1"
    shown, hidden = (
        to_litellm_exception(error, model="m", provider="p", api_base=base, hide_setup=hide) for hide in (False, True)
    )
    assert f"{base}: Send a key." in shown.message
    assert base not in hidden.message
    assert f"Request to p/m failed: {base}: Send a key." in caplog.text


def test_exception_has_param_code_and_type():
    error = convert(errors.InvalidParameter("`top_p` is wrong.", param="top_p"))
    assert (error.param, error.code, error.type) == ("top_p", "invalid_value", "invalid_request_error")
    assert error.message == "litellm.BadRequestError: `top_p` is wrong."
    assert (error.model, error.llm_provider) == ("m", "p")


def test_queue_full_has_retry_after_header():
    assert convert(errors.QueueFull("Busy.", retry_after=2.5)).response.headers["retry-after"] == "3"


def test_proxy_clients_do_not_see_paths(caplog):
    error = errors.CheckpointError("/home/somebody/secret is not a checkpoint.")
    assert "/home/somebody/secret" in convert(error).message
    assert convert(error, proxied=True).message.endswith(HIDDEN_MESSAGE)
    assert "/home/somebody/secret" in caplog.text
    missing = errors.MediaUnreachable("Missing.", file=Path("/home/somebody/a.png"))
    assert "/home/somebody/a.png" in convert(missing).message
    assert convert(missing, proxied=True).message.endswith("Missing.")
    assert "pip" in convert(errors.QueueFull("pip"), proxied=True).message
