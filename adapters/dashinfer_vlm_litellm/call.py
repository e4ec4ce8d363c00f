"""Convert the arguments of a LiteLLM provider to an engine request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dashinfer_vlm_core.protocol.validation_errors import invalid, unsupported

PROVIDER_ARGUMENTS = frozenset({"engine_options", "first_token_timeout"})
"""Arguments for the provider, which are not sent to the engine."""

LITELLM_ARGUMENTS = frozenset({"max_retries", "stream", "extra_body"})
"""Arguments of LiteLLM itself among the request fields."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A LiteLLM call.

    Attributes:
        model: the model's name without the provider prefix.
        request: the request for the engine, as OpenAI's JSON.
        engine_options: EngineConfig fields of an engine in this process.
        api_base: the base URL of a server; None for an engine in this process.
        api_key: the server's API key.
        timeout: seconds for the complete response; None means no limit.
        first_token_timeout: seconds until the first token of a stream; None means `timeout`.
    """

    model: str
    request: Mapping[str, Any]
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    api_base: str | None = None
    api_key: str | None = None
    timeout: float | None = None
    first_token_timeout: float | None = None


def read_call(arguments: Mapping[str, Any], *, stream: bool) -> Call:
    """Parse the arguments that LiteLLM passes to a provider.

    Raises:
        InvalidParameter: an argument of this provider is invalid.
        UnsupportedParameter: a client of the proxy sets what only its operator may set.
    """
    given: dict[str, Any] = dict(arguments["optional_params"])
    client = _client_body(arguments)
    if "engine_options" in client:
        raise unsupported("engine_options", "can only be set by the operator of the proxy.")
    if arguments.get("headers") and not client:  # the proxy handles the headers of its clients
        raise unsupported("extra_headers", "is not supported. Leave it out.")
    request = {name: value for name, value in given.items() if name not in PROVIDER_ARGUMENTS | LITELLM_ARGUMENTS}
    request |= given.get("extra_body") or {}
    request |= {"messages": arguments["messages"]}
    if stream:
        request = _stream_request(request)
    return Call(
        model=arguments["model"],
        request=MappingProxyType(request),
        engine_options=_options(given, arguments.get("api_base")),
        api_base=arguments.get("api_base"),
        api_key=arguments.get("api_key"),
        timeout=_seconds(arguments.get("timeout"), "timeout"),
        first_token_timeout=_seconds(given.get("first_token_timeout"), "first_token_timeout"),
    )


def is_proxied(arguments: Mapping[str, Any]) -> bool:
    """Return whether a client of LiteLLM's proxy sent the call, and not this program."""
    return bool(_client_body(arguments))


def _stream_request(request: dict[str, Any]) -> dict[str, Any]:
    """Always request the usage: without it, LiteLLM uses an inaccurate estimate. It hides it if not requested."""
    return request | {
        "stream": True,
        "stream_options": {**(request.get("stream_options") or {}), "include_usage": True},
    }


def _options(given: Mapping[str, Any], api_base: str | None) -> Mapping[str, Any]:
    options = given.get("engine_options") or {}
    if not isinstance(options, Mapping):
        raise invalid("engine_options", 'must be an object with EngineConfig fields, such as {"max_model_len": 4096}.')
    if options and api_base:
        raise invalid("engine_options", "configure an engine in this process, and cannot be combined with `api_base`.")
    return options


def _seconds(value: Any, name: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise invalid(name, f"must be a positive number of seconds, got {value!r}.")
    return float(value)


def _client_body(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    proxied = (arguments.get("litellm_params") or {}).get("proxy_server_request") or {}
    return proxied.get("body") or {}
