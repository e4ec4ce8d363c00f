"""What LiteLLM hands to a provider -> what an engine takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dashinfer_vlm_core.errors import InvalidParameter, UnsupportedParameter

OURS = frozenset({"engine_options", "first_token_timeout"})
"""Arguments that are for the provider, not for the engine."""

LITELLMS = frozenset({"max_retries", "stream", "extra_body"})
"""Arguments that LiteLLM leaves among those of the request, and that are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of LiteLLM.

    Attributes:
        model: as the caller named it, without the provider.
        request: what goes to the engine, as OpenAI's JSON.
        engine_options: fields of EngineConfig for an engine in this process, frozen as pairs.
        api_base: address of a server to ask instead; None for an engine in this process.
        api_key: its key.
        timeout: seconds for the whole answer; None waits for ever.
        first_token_timeout: seconds until the first token of a stream; None waits as long as for the whole.
    """

    model: str
    request: Mapping[str, Any]
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    api_base: str | None = None
    api_key: str | None = None
    timeout: float | None = None
    first_token_timeout: float | None = None


def read_call(arguments: Mapping[str, Any], *, stream: bool) -> Call:
    """Take apart what LiteLLM passes to a handler.

    Raises:
        InvalidParameter: an argument of ours has the wrong shape.
        UnsupportedParameter: a client of the proxy names what is its operator's to set, or a stream what LiteLLM would
            spoil.
    """
    given: dict[str, Any] = dict(arguments["optional_params"])
    client = _body_of_client(arguments)
    if "engine_options" in client:
        raise UnsupportedParameter("`engine_options` are set by the operator of the proxy.", param="engine_options")
    if arguments.get("headers") and not client:  # those of a client are the proxy's to pass on or not
        raise UnsupportedParameter("`extra_headers` are not sent: leave them out.", param="extra_headers")
    request = {name: value for name, value in given.items() if name not in OURS | LITELLMS}
    request |= given.get("extra_body") or {}
    request |= {"messages": arguments["messages"]}
    if stream:
        request = _streamed(request)
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
    """Whether a client of LiteLLM's proxy sent the call, rather than the program that this is part of."""
    return bool(_body_of_client(arguments))


def _streamed(request: dict[str, Any]) -> dict[str, Any]:
    """LiteLLM shows the usage to whom asked for it, and counts by itself, badly, where it gets none."""
    if request.get("n", 1) != 1:
        raise UnsupportedParameter(
            "`n` cannot be above 1 in a stream: LiteLLM keeps one finish reason only. Leave out one of the two.",
            param="n",
        )
    return request | {
        "stream": True,
        "stream_options": {**(request.get("stream_options") or {}), "include_usage": True},
    }


def _options(given: Mapping[str, Any], api_base: str | None) -> Mapping[str, Any]:
    options = given.get("engine_options") or {}
    if not isinstance(options, Mapping):
        raise InvalidParameter(
            '`engine_options` must be an object with fields of EngineConfig, such as {"max_model_len": 4096}.',
            param="engine_options",
        )
    if options and api_base:
        raise InvalidParameter(
            "`engine_options` are for an engine in this process; the one at `api_base` has options of its own.",
            param="engine_options",
        )
    return options


def _seconds(value: Any, name: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise InvalidParameter(f"`{name}` must be a number of seconds above 0.", param=name)
    return float(value)


def _body_of_client(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a client of the proxy sent; nothing for calls of this program."""
    proxied = (arguments.get("litellm_params") or {}).get("proxy_server_request") or {}
    return proxied.get("body") or {}
