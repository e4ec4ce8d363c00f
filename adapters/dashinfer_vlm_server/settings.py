"""Settings of the server. A field that is declared with `option` is also an option of `dashinfer-vlm serve`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from dashinfer_vlm_core.config import MIB
from dashinfer_vlm_core.errors import ConfigError

from .api_key_file import MAX_LIMIT, KeyLimits
from .api_keys import KEY_VARIABLE, KEYS_VARIABLE, ApiKeys
from .help import IntegerRange, NumberRange, option
from .logs import LogFormat, set_format

if TYPE_CHECKING:
    from .tracing import Tracer

SECURITY = "Security"
LIMITS = "Request limits"
LOGS = "Logs and traces"

BUFFERED_BODIES = 7
"""Bodies of the maximum size that are held in memory: 2 GiB by default."""

GRACE_SECONDS = 20.0
"""Time for running requests to finish after a signal; a second signal ends it. Kubernetes waits for 30 s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyOptions:
    """The options that `ApiKeys` are read from."""

    api_keys: tuple[str, ...] = option(
        SECURITY,
        (),
        f"API key that clients must send; can be repeated. {KEYS_VARIABLE} (separated by spaces) and a file are safer:"
        " `ps` shows command lines to all users.",
        flag="--api-key",
        multiple=True,
        envvar=[KEYS_VARIABLE, KEY_VARIABLE],
        metavar="KEY",
    )
    api_key_file: Path | None = option(
        SECURITY, None, "File with API keys, one per line, which limits can follow; read again when it changes."
    )
    max_requests_per_key: int | None = option(
        LIMITS,
        None,
        "Maximum number of concurrent requests of an API key without its own limit.",
        type=IntegerRange(1, MAX_LIMIT),
    )
    tokens_per_minute_per_key: int | None = option(
        LIMITS,
        None,
        "Maximum number of prompt and completion tokens per minute of an API key without its own limit.",
        type=IntegerRange(1, MAX_LIMIT),
    )

    def read(self) -> ApiKeys:
        """Return the keys.

        Raises:
            ConfigError: a key is invalid, the file cannot be read, or there are limits without keys.
        """
        limits = KeyLimits(max_requests=self.max_requests_per_key, tokens_per_minute=self.tokens_per_minute_per_key)
        keys = ApiKeys.read(self.api_keys, self.api_key_file, limits=limits)
        if limits != KeyLimits() and not len(keys):
            raise ConfigError(
                "--max-requests-per-key and --tokens-per-minute-per-key require API keys. Set --api-key-file."
            )
        return keys


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of an application.

    Attributes:
        page: whether to serve the chat page at `/`, and `POST /v1/media/preview`, which it uses; see `page.py`.
        share_media_between_keys: whether requests with different keys share cached media and prompts, and the `uuid`
            namespace.
        allowed_hosts: host names that clients may use for a server without keys, in addition to loopback names and IP
            addresses: `name`, `*.domain` for its subdomains, or `*` for all.
        allowed_origins: origins whose pages may send requests and read responses (CORS); `*` allows all.
        max_body_mib: maximum size of a request body in MiB; larger ones are rejected with 413. A video of 200 MiB is
            267 MiB in base64.
        max_stored_responses: maximum number of responses of the Responses API that are stored in memory; 0 stores none.
        request_timeout: maximum number of seconds for a response, measured after its request was read; None for no
            limit.
        keys: API keys; every request must send one of them, unless there are none.
        namespace_secret: makes the cache namespaces of keys the same in all processes that share it and the embedding
            store; empty for namespaces of this process.
        max_buffered_bytes: maximum size of the bodies of all running requests together, which API keys share fairly;
            requests that exceed it are rejected with 429. `BUFFERED_BODIES` of the largest ones if None.
        max_stored_bytes: maximum memory of the stored responses, with the items of their requests.
        max_body_pause: maximum number of seconds between two chunks of a body, and for a whole body in addition to a
            second per 16 KiB; after that, the request is rejected with 408.
        clock: the monotonic clock, in seconds, of the keys' limits and of the checks of their file.
        tracer: records traces of requests, in addition to the metrics.
    """

    page: bool = option("Network", True, "Whether to serve the chat page at / and POST /v1/media/preview.")
    share_media_between_keys: bool = option(
        SECURITY, False, "Whether requests with different API keys share cached images, videos and prompts."
    )
    allowed_hosts: tuple[str, ...] = option(
        SECURITY,
        (),
        "Host names that clients may use if there are no API keys, in addition to loopback names and IP addresses,"
        " separated by commas; * allows all.",
    )
    allowed_origins: tuple[str, ...] = option(
        SECURITY, (), "Origins allowed to send requests (CORS), separated by commas; * allows all.", metavar="URL,..."
    )
    max_body_mib: float = option(
        LIMITS,
        288,
        "Maximum size of a request body; those in memory have at most seven times as much.",
        type=IntegerRange(1),
    )
    max_stored_responses: int = option(
        LIMITS,
        1000,
        "Maximum number of responses of the Responses API in memory; 0 stores none.",
        type=IntegerRange(0),
    )
    request_timeout: float | None = option(
        LIMITS, None, "Maximum time for a response; no limit by default.", type=NumberRange(0, min_open=True)
    )
    keys: ApiKeys = field(default_factory=ApiKeys)
    namespace_secret: bytes = field(default=b"", repr=False)
    max_buffered_bytes: int | None = None
    max_stored_bytes: int = 256 * MIB
    max_body_pause: float = 60.0
    clock: Callable[[], float] = time.monotonic
    tracer: Tracer | None = None

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mib * MIB)

    @property
    def isolates_keys(self) -> bool:
        """Whether keys share no cached media and prompts. A single key outside of a file stays the only one."""
        return not self.share_media_between_keys and (len(self.keys) > 1 or self.keys.file is not None)


def _set_format(context: click.Context, _option: click.Parameter, log_format: LogFormat) -> LogFormat:
    """Set the format immediately, so that errors in other options are also logged in it."""
    if not context.resilient_parsing:
        set_format(log_format)
    return log_format


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessOptions:
    """Options of the process that serves an application."""

    grace: float = option(
        LIMITS,
        GRACE_SECONDS,
        "Grace period for running requests after a signal.",
        type=NumberRange(0),
        metavar="SECONDS",
    )
    log_format: LogFormat = option(
        LOGS, "text", "Format of log lines.", type=click.Choice(get_args(LogFormat)), callback=_set_format
    )
    otlp_traces_endpoint: str | None = option(
        LOGS, None, "OTLP/HTTP endpoint for traces, such as http://127.0.0.1:4318/v1/traces.", metavar="URL"
    )


@dataclass(slots=True, eq=False)
class DrainState:
    """Whether the server accepts new requests.

    Attributes:
        draining: whether the server is shutting down: it finishes running requests and rejects new ones.
    """

    draining: bool = False
