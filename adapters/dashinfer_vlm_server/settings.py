"""Settings of the server: request limits, authentication and observability."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dashinfer_vlm_core.config import MIB

from .api_keys import ApiKeys

if TYPE_CHECKING:
    from .tracing import Tracer


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of an application.

    Attributes:
        max_body_bytes: maximum size of a request body; larger ones are rejected with 413. A video of 200 MiB is
            267 MiB in base64.
        max_buffered_bytes: maximum size of the bodies of all running requests together, which API keys share fairly;
            requests that exceed it are rejected with 429.
        max_stored_responses: maximum number of responses of the Responses API that are stored in memory; 0 stores none.
        max_stored_bytes: maximum memory of the stored responses, with the items of their requests.
        max_body_pause: maximum number of seconds between two chunks of a body, and for a whole body in addition to a
            second per 16 KiB; after that, the request is rejected with 408.
        request_timeout: maximum number of seconds for a response, measured after its request was read; None for no
            limit.
        keys: API keys; every request must send one of them, unless there are none.
        share_media_between_keys: whether requests with different keys share cached media and prompts, and the `uuid`
            namespace.
        namespace_secret: makes the cache namespaces of keys the same in all processes that share it and the embedding
            store; empty for namespaces of this process.
        allowed_hosts: host names that clients may use for a server without keys, in addition to loopback names and IP
            addresses: `name`, `*.domain` for its subdomains, or `*` for all.
        allowed_origins: origins whose pages may send requests and read responses (CORS); `*` allows all.
        page: whether to serve the chat page at `/`, and `POST /v1/media/preview`, which it uses; see `page.py`.
        clock: the monotonic clock, in seconds, of the keys' limits and of the checks of their file.
        tracer: records traces of requests, in addition to the metrics.
    """

    max_body_bytes: int = 288 * MIB
    max_buffered_bytes: int = 2048 * MIB
    max_stored_responses: int = 1000
    max_stored_bytes: int = 256 * MIB
    max_body_pause: float = 60.0
    request_timeout: float | None = None
    keys: ApiKeys = field(default_factory=ApiKeys)
    allowed_hosts: tuple[str, ...] = ()
    share_media_between_keys: bool = False
    namespace_secret: bytes = field(default=b"", repr=False)
    allowed_origins: tuple[str, ...] = ()
    page: bool = True
    clock: Callable[[], float] = time.monotonic
    tracer: Tracer | None = None

    @property
    def isolates_keys(self) -> bool:
        """Whether keys share no cached media and prompts. A single key outside of a file stays the only one."""
        return not self.share_media_between_keys and (len(self.keys) > 1 or self.keys.file is not None)


@dataclass(slots=True, eq=False)
class DrainState:
    """Whether the server accepts new requests.

    Attributes:
        draining: whether the server is shutting down: it finishes running requests and rejects new ones.
    """

    draining: bool = False
