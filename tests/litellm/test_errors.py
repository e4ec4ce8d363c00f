"""Every kind of our errors is one of LiteLLM's classes, and says what the caller has to mend."""

from __future__ import annotations

import litellm
import pytest

from dashinfer_vlm_core import errors
from dashinfer_vlm_litellm.errors import HIDDEN, as_litellm

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


def family(kind):
    return {kind}.union(*(family(child) for child in kind.__subclasses__()))


def shown(error, *, proxied=False):
    return as_litellm(error, model="m", provider="p", hide_setup=proxied)


def test_every_error_has_a_class():
    assert family(errors.DashInferVLMError) - {errors.DashInferVLMError} == CLASSES.keys()
    assert {kind: type(shown(kind("Wrong."))) for kind in CLASSES} == CLASSES


@pytest.mark.parametrize("kind", CLASSES)
def test_the_router_tries_again_what_may_succeed_elsewhere(kind):
    """Which is what is no fault of the request; the set-up of a proxy's other deployment may be better."""
    error = shown(kind("Wrong."), proxied=True)
    retried = litellm.should_retry(error.status_code) or isinstance(error, litellm.AuthenticationError)
    assert retried is not issubclass(kind, errors.RequestError)


def test_a_mistake_in_the_set_up_is_that_of_the_program_which_made_it():
    error = shown(errors.ConfigError("`max_model_len` is wrong.", param="max_model_len"))
    assert (type(error), error.type, error.param) == (litellm.BadRequestError, "invalid_request_error", "max_model_len")
    assert error.message == "litellm.BadRequestError: `max_model_len` is wrong."
    assert not litellm.should_retry(error.status_code)
    hidden = shown(errors.ConfigError("`max_model_len` is wrong.", param="max_model_len"), proxied=True)
    assert (type(hidden), hidden.param) == (litellm.InternalServerError, None)


def test_an_error_names_the_field_and_the_kind():
    error = shown(errors.InvalidParameter("`top_p` is wrong.", param="top_p"))
    assert (error.param, error.code, error.type) == ("top_p", "invalid_value", "invalid_request_error")
    assert error.message == "litellm.BadRequestError: `top_p` is wrong."
    assert (error.model, error.llm_provider) == ("m", "p")


def test_a_full_queue_says_when_to_try_again():
    assert shown(errors.QueueFull("Busy.", retry_after=2.5)).response.headers["retry-after"] == "3"


def test_clients_of_a_proxy_do_not_see_its_operators_folders(caplog):
    error = errors.CheckpointError("/home/somebody/secret is no checkpoint.")
    assert "/home/somebody/secret" in shown(error).message
    assert shown(error, proxied=True).message.endswith(HIDDEN)
    assert "/home/somebody/secret" in caplog.text
    assert "pip" in shown(errors.QueueFull("pip"), proxied=True).message
