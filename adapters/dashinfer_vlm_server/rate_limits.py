"""Limits per API key: concurrent requests, and tokens per minute.

Tokens are counted while they are processed: the prompt once it is built, and each token of the completion. A request
that is canceled has therefore used what was computed for it.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from starlette.exceptions import HTTPException

from dashinfer_vlm_core.engine.observers import RequestObserver

if TYPE_CHECKING:
    from .api_keys import ApiKey

Clock = Callable[[], float]
"""Returns seconds from any starting point; never goes back."""

RejectionReason = Literal["max_requests", "tokens_per_minute"]

MINUTE = 60.0

REQUEST_RETRY_SECONDS = 1
"""`Retry-After` of a key with too many concurrent requests: when one of them ends cannot be known."""


class TokenBucket:
    """The tokens that a key has used. They are returned continuously, the whole limit within a minute.

    Threads can share it: the engine's event loop adds tokens, the server's reads them.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._used = 0.0
        self._updated_at = clock()
        self._lock = threading.Lock()

    def add(self, num_tokens: int, limit: int) -> None:
        """Use tokens of a limit per minute. They can exceed it, which delays the next request."""
        with self._lock:
            self._update(limit)
            self._used += num_tokens

    def used(self, limit: int) -> float:
        with self._lock:
            self._update(limit)
            return self._used

    def _update(self, limit: int) -> None:
        now = self._clock()
        self._used = max(0.0, self._used - (now - self._updated_at) * limit / MINUTE)
        self._updated_at = now


@dataclass(slots=True, eq=False)
class _KeyState:
    """What one key uses now: its tokens of the last minute, and the number of its running requests."""

    tokens: TokenBucket
    running: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenMeter:
    """Adds the tokens of one request to the bucket of its key.

    Attributes:
        limiter: the limiter that the request belongs to; an engine can serve several applications.
        bucket: the tokens that the key has used.
        limit: tokens per minute.
    """

    limiter: KeyLimiter
    bucket: TokenBucket
    limit: int

    def headers(self) -> dict[str, str]:
        """Return OpenAI's response headers about tokens per minute.

        There are none about requests: in OpenAI's API they count requests per minute, which is not limited here.
        """
        used = self.bucket.used(self.limit)
        return {
            "x-ratelimit-limit-tokens": str(self.limit),
            "x-ratelimit-remaining-tokens": str(max(0, math.floor(self.limit - used))),
            "x-ratelimit-reset-tokens": _duration(used * MINUTE / self.limit),
        }


RATE_LIMIT_HEADERS = ("x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens")

_current_meter: ContextVar[TokenMeter | None] = ContextVar("dashinfer_vlm_token_meter", default=None)


class KeyLimiter(RequestObserver):
    """Applies the limits of API keys. Except for counting tokens, it belongs to the server's event loop.

    Args:
        clock: measures the minute of `tokens_per_minute`.
        on_rejection: called with the reason of each rejection.
    """

    def __init__(self, *, clock: Clock, on_rejection: Callable[[RejectionReason], None]) -> None:
        self._clock = clock
        self._on_rejection = on_rejection
        self._states: dict[str, _KeyState] = {}

    @contextlib.contextmanager
    def admit(self, key: ApiKey, *, generates: bool) -> Iterator[TokenMeter | None]:
        """Count a request of a key while the context is active; yields what counts its tokens, if they are limited.

        Args:
            key: the key of the request.
            generates: whether it uses tokens.

        Raises:
            HTTPException: 429, the key exceeds a limit.
        """
        state = self._states.setdefault(key.id, _KeyState(TokenBucket(self._clock)))
        limit = key.limits.max_requests
        if limit is not None and state.running >= limit:
            self._on_rejection("max_requests")
            raise _too_many_requests(limit)
        meter = None
        if generates and key.limits.tokens_per_minute is not None:
            meter = TokenMeter(limiter=self, bucket=state.tokens, limit=key.limits.tokens_per_minute)
            if seconds := _seconds_until_available(meter):
                self._on_rejection("tokens_per_minute")
                raise _too_many_tokens(meter, seconds)
        token = _current_meter.set(meter)
        state.running += 1
        try:
            yield meter
        finally:
            state.running -= 1
            _current_meter.reset(token)

    def discard_except(self, ids: Collection[str]) -> None:
        """Discard what keys other than those with these ids have used."""
        self._states = {id_: state for id_, state in self._states.items() if id_ in ids}

    # RequestObserver: called on the engine's event loop, with the context variables of the request

    def prompt_built(self, num_tokens: int) -> None:
        meter = _current_meter.get()
        if meter is not None and meter.limiter is self:
            meter.bucket.add(num_tokens, meter.limit)

    def token_decoded(self) -> None:
        self.prompt_built(1)


def _seconds_until_available(meter: TokenMeter) -> int:
    excess = meter.bucket.used(meter.limit) - (meter.limit - 1)
    return math.ceil(excess * MINUTE / meter.limit) if excess > _ROUNDING else 0


_ROUNDING = 1e-6
"""Tokens. Rounding errors of the elapsed time must not reject a client that waited for `Retry-After`."""


def _too_many_requests(limit: int) -> HTTPException:
    requests = "1 request" if limit == 1 else f"{limit} requests"
    return HTTPException(
        429,
        f"Rate limit reached: this API key can run {requests} at a time. Try again when one has ended.",
        headers={"Retry-After": str(REQUEST_RETRY_SECONDS)},
    )


def _too_many_tokens(meter: TokenMeter, seconds: int) -> HTTPException:
    return HTTPException(
        429,
        f"Rate limit reached: this API key can use {meter.limit} tokens per minute. Try again in"
        f" {seconds} {'second' if seconds == 1 else 'seconds'}.",
        headers={"Retry-After": str(seconds), **meter.headers()},
    )


def _duration(seconds: float) -> str:
    if 0 < seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
