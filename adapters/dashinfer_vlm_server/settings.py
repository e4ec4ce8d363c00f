"""How the door is set up: what a request may take, who may ask, and what is told about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dashinfer_vlm_core.config import MIB

from .api_keys import ApiKeys

if TYPE_CHECKING:
    from .tracing import Tracer


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Of an application.

    Attributes:
        max_body_bytes: most bytes of a request's body; larger ones are refused with 413. A video of 200 MiB is
            267 MiB in base64.
        max_held_bytes: most bytes of the bodies of all requests in work; those above it are refused with 429.
        max_body_pause: most seconds between two pieces of it; after longer ones it is refused with 408.
        request_timeout: seconds that an answer may take, from when its request was read; None sets no limit.
        keys: one of which a request must bring, unless there are none.
        allowed_origins: origins whose pages may read answers (CORS); `*` is all of them.
        page: whether `/` answers with a page to ask from, see `page.py`.
        tracer: is told of requests, besides the metrics.
    """

    max_body_bytes: int = 288 * MIB
    max_buffered_bytes: int = 2048 * MIB
    max_body_pause: float = 60.0
    request_timeout: float | None = None
    keys: ApiKeys = field(default_factory=ApiKeys)
    allowed_origins: tuple[str, ...] = ()
    page: bool = True
    tracer: Tracer | None = None


@dataclass(slots=True, eq=False)
class DrainState:
    """Whether new requests are let in.

    Attributes:
        draining: the server ends, and answers only what it has begun.
    """

    draining: bool = False
