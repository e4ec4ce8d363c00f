"""Convert the arguments of a LiteLLM provider to an engine request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dashinfer_vlm_core.protocol.validation_errors import invalid, unsupported

PROVIDER_ARGUMENTS = frozenset({"engine_options", "first_token_timeout"})
"""Arguments for the provider, which are not sent to the engine."""

LITELLM_ARGUMENTS = frozenset({"max_retries", "stream", "extra_body"})
"""Arguments of LiteLLM itself among the request fields."""


def read_request(arguments: Mapping[str, Any], *, stream: bool) -> dict[str, Any]:
    """Return the request for the engine, as OpenAI's JSON, from the arguments that LiteLLM passes to a provider.

    Raises:
        UnsupportedParameter: a client of the proxy sets what only its operator may set.
    """
    request = _read_fields(arguments) | {"messages": arguments["messages"]}
    if stream:  # without the usage, LiteLLM uses an inaccurate estimate; it hides the usage if it was not requested
        options = {**(request.get("stream_options") or {}), "include_usage": True}
        request |= {"stream": True, "stream_options": options}
    return request


def read_embedding_request(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Like `read_request`, for embeddings of the input or of `messages`. Raises the same errors."""
    request = _read_fields(arguments)
    # LiteLLM passes an empty input if there is none.
    return request if "messages" in request and not arguments["input"] else request | {"input": arguments["input"]}


def _read_fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = dict(arguments["optional_params"])
    client = _client_body(arguments)
    if "engine_options" in client:
        raise unsupported("engine_options", "can only be set by the operator of the proxy.")
    if arguments.get("headers") and not client:  # the proxy handles the headers of its clients
        raise unsupported("extra_headers", "is not supported. Leave it out.")
    request = {name: value for name, value in given.items() if name not in PROVIDER_ARGUMENTS | LITELLM_ARGUMENTS}
    return request | (given.get("extra_body") or {})


def is_proxied(arguments: Mapping[str, Any]) -> bool:
    """Return whether a client of LiteLLM's proxy sent the call, and not this program."""
    return bool(_client_body(arguments))


def read_engine_options(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the EngineConfig fields of an engine in this process. Raises InvalidParameter."""
    options = arguments["optional_params"].get("engine_options") or {}
    if not isinstance(options, Mapping):
        raise invalid("engine_options", 'must be an object with EngineConfig fields, such as {"max_model_len": 4096}.')
    if options and arguments.get("api_base"):
        raise invalid("engine_options", "configure an engine in this process, and cannot be combined with `api_base`.")
    return options


def read_seconds(value: Any, name: str) -> float | None:
    """Return the value of a timeout; None means no limit. Raises InvalidParameter."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise invalid(name, f"must be a positive number of seconds, got {value!r}.")
    return float(value)


def _client_body(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    proxied = (arguments.get("litellm_params") or {}).get("proxy_server_request") or {}
    return proxied.get("body") or {}
