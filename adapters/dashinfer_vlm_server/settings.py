"""Settings of the server. A field of the classes with a title is an option of `dashinfer-vlm serve`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from dashinfer_vlm_core.config import MIB
from dashinfer_vlm_core.errors import ConfigError

from .api_keys import MAX_LIMIT, ApiKeys, KeyLimits
from .help import OPTIONS

BUFFERED_BODIES = 7
"""Bodies of the maximum size that are held in memory: 2 GiB by default."""

GRACE_SECONDS = 20.0
"""Time for running requests to finish after a signal; a second signal ends it. Kubernetes waits for 30 s."""


def _split(value: object) -> object:
    return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_split)]


@dataclass(config=OPTIONS, frozen=True, kw_only=True, slots=True)
class KeyOptions:
    """Options that API keys are read from."""

    title: ClassVar[str] = "API keys"

    api_key_file: Path | None = Field(default=None, title="FILE")
    """File with API keys, one per line, which limits can follow; read again when it changes."""

    max_requests_per_key: int | None = Field(default=None, ge=1, le=MAX_LIMIT)
    """Maximum number of concurrent requests of an API key without its own limit."""

    tokens_per_minute_per_key: int | None = Field(default=None, ge=1, le=MAX_LIMIT)
    """Maximum number of prompt and completion tokens per minute of an API key without its own limit."""

    def read(self, given: Iterable[str]) -> ApiKeys:
        """Return the given keys and those of the file.

        Raises:
            ConfigError: a key is invalid, the file cannot be read, or there are limits without keys.
        """
        limits = KeyLimits(max_requests=self.max_requests_per_key, tokens_per_minute=self.tokens_per_minute_per_key)
        keys = ApiKeys(given, self.api_key_file, limits=limits)
        if limits != KeyLimits() and not len(keys):
            raise ConfigError(
                "--max-requests-per-key and --tokens-per-minute-per-key require API keys. Set --api-key-file."
            )
        return keys


@dataclass(config=OPTIONS, frozen=True, kw_only=True, slots=True)
class ApplicationOptions:
    """Options of an application."""

    title: ClassVar[str] = "Requests"

    protocols: Names = Field(default=(), title="NAME,...")
    """Protocols to serve, separated by commas: anthropic, ocr, ollama, openai, responses; all by default."""

    page: bool = True
    """Whether to serve the chat page at / and POST /v1/media/preview."""

    share_media_between_keys: bool = False
    """Whether requests with different API keys share cached images, videos and prompts."""

    allowed_hosts: Names = Field(default=(), title="NAME,...")
    """Host names that clients may use if there are no API keys, in addition to loopback names and IP addresses,
    separated by commas: `name`, `*.domain` for its subdomains, or `*` for all."""

    allowed_origins: Names = Field(default=(), title="URL,...")
    """Origins allowed to send requests (CORS), separated by commas; * allows all."""

    max_body_mib: float = Field(default=288, gt=0)
    """Maximum size of a request body; those in memory have at most seven times as much."""

    max_stored_responses: int = Field(default=1000, ge=0)
    """Maximum number of responses of the Responses API in memory; 0 stores none."""

    max_background_responses: int = Field(default=16, ge=0)
    """Maximum number of responses that an API key can create in the background at a time."""

    request_timeout: float | None = Field(default=None, gt=0)
    """Maximum time for a response after its request was read; no limit by default."""


@dataclass(config=OPTIONS, frozen=True, kw_only=True, slots=True)
class Settings(ApplicationOptions):
    """Settings of an application.

    Attributes:
        keys: API keys; every request must send one of them, unless there are none.
        namespace_secret: makes the cache namespaces of keys the same in all processes that share it and the embedding
            store; empty for namespaces of this process.
        max_buffered_bytes: maximum size of the bodies of all running requests together, which API keys share fairly;
            requests that exceed it are rejected with 429. `BUFFERED_BODIES` of the largest ones if None.
        max_stored_bytes: maximum memory of the stored responses, with the items of their requests.
        max_body_pause: maximum number of seconds between two chunks of a body, and for a whole body in addition to a
            second per 16 KiB; after that, the request is rejected with 408.
        clock: the monotonic clock, in seconds, of the keys' limits and of the checks of their file.
        allow_model_management: whether clients of a server without keys may load and unload models.
    """

    keys: ApiKeys = field(default_factory=ApiKeys)
    namespace_secret: bytes = field(default=b"", repr=False)
    max_buffered_bytes: int | None = None
    max_stored_bytes: int = 256 * MIB
    max_body_pause: float = 60.0
    clock: Callable[[], float] = time.monotonic
    allow_model_management: bool = False

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mib * MIB)

    @property
    def isolates_keys(self) -> bool:
        """Whether keys share no cached media and prompts. A single key outside of a file stays the only one."""
        return not self.share_media_between_keys and (len(self.keys) > 1 or self.keys.file is not None)


@dataclass(config=OPTIONS, frozen=True, kw_only=True, slots=True)
class ProcessOptions:
    """Options of the process that serves an application."""

    title: ClassVar[str] = "Process"

    grace: float = Field(default=GRACE_SECONDS, ge=0, title="SECONDS")
    """Grace period for running requests after a signal."""

    otlp_traces_endpoint: str | None = Field(default=None, title="URL")
    """OTLP/HTTP endpoint for traces, such as http://127.0.0.1:4318/v1/traces."""


@plain_dataclass(slots=True, eq=False)
class DrainState:
    """Whether the server accepts new requests, and what has to end before it exits, in addition to requests.

    Attributes:
        draining: whether the server is shutting down: it finishes running requests and rejects new ones.
        background: the number of responses that are created in the background.
        on_drain: functions that `drain` calls, such as those that close idle connections.
    """

    draining: bool = False
    background: int = 0
    on_drain: set[Callable[[], None]] = field(default_factory=set)

    def drain(self) -> None:
        """Begin to shut down."""
        self.draining = True
        for notify in tuple(self.on_drain):
            notify()
