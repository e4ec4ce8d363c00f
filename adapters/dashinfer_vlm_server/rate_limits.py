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
from typing import TYPE_CHECKING, Literal

from starlette.exceptions import HTTPException

from dashinfer_vlm_core.engine.observers import RequestObserver

if TYPE_CHECKING:
    from .api_keys import ApiKey

Clock = Callable[[], float]
"""Returns seconds from any starting point; never goes back."""

RejectionReason = Literal["max_requests", "tokens_per_minute"]

MINUTE = 60.0

_ROUNDING = 1e-6
"""Tokens. Rounding errors of the elapsed time must not reject a client that waited for `Retry-After`."""

REQUEST_RETRY_SECONDS = 1
"""`Retry-After` of a key with too many concurrent requests: when one of them ends cannot be known."""


class KeyUsage:
    """What one key uses now: its running requests, and the tokens of the last minute.

    Tokens are returned continuously, the whole limit within a minute. Threads can share them: the engine's event loop
    adds tokens, the server's reads them.

    Attributes:
        limiter: the limiter that counts it; an engine can serve several applications.
        tokens_per_minute: the present limit of the key.
        running: the number of running requests.
    """

    def __init__(self, limiter: KeyLimiter, clock: Clock) -> None:
        self.limiter = limiter
        self.tokens_per_minute = 0
        self.running = 0
        self._clock = clock
        self._used = 0.0
        self._updated_at = clock()
        self._lock = threading.Lock()

    def use(self, num_tokens: int) -> None:
        """Use tokens. They can exceed the limit, which delays the next request."""
        with self._lock:
            self._return_tokens()
            self._used += num_tokens

    def used(self) -> float:
        """Return how many tokens are in use."""
        with self._lock:
            self._return_tokens()
            return self._used

    def _return_tokens(self) -> None:
        now = self._clock()
        returned = (now - self._updated_at) * self.tokens_per_minute / MINUTE
        self._used = max(0.0, self._used - returned)
        self._updated_at = now

    def seconds_until_available(self) -> int:
        """Return the time until the next request is admitted; 0 if it is now."""
        excess = self.used() - (self.tokens_per_minute - 1)
        return math.ceil(excess * MINUTE / self.tokens_per_minute) if excess > _ROUNDING else 0

    def headers(self) -> dict[str, str]:
        """Return OpenAI's response headers about tokens per minute.

        There are none about requests: in OpenAI's API they count requests per minute, which is not limited here.
        """
        limit = self.tokens_per_minute
        used = self.used()
        return {
            "x-ratelimit-limit-tokens": str(limit),
            "x-ratelimit-remaining-tokens": str(max(0, math.floor(limit - used))),
            "x-ratelimit-reset-tokens": _duration(used * MINUTE / limit),
        }


RATE_LIMIT_HEADERS = ("x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens")

_limited_usage: ContextVar[KeyUsage | None] = ContextVar("dashinfer_vlm_limited_usage", default=None)
"""The usage of the current request's key, if its tokens are limited."""

_usage: ContextVar[KeyUsage | None] = ContextVar("dashinfer_vlm_usage", default=None)
"""The usage of the current request's key, if it has one."""


@contextlib.contextmanager
def hold_request() -> Iterator[None]:
    """Count the current request as running while the context is active, even if it has been answered."""
    usage = _usage.get()
    if usage is None:
        yield
        return
    usage.running += 1
    try:
        yield
    finally:
        usage.running -= 1


class KeyLimiter(RequestObserver):
    """Applies the limits of API keys. Except for counting tokens, it belongs to the server's event loop.

    Args:
        clock: measures the minute of `tokens_per_minute`.
        on_rejection: called with the reason of each rejection.
    """

    def __init__(self, *, clock: Clock, on_rejection: Callable[[RejectionReason], None]) -> None:
        self._clock = clock
        self._on_rejection = on_rejection
        self._usage: dict[str, KeyUsage] = {}

    @contextlib.contextmanager
    def admit(self, key: ApiKey, *, generates: bool) -> Iterator[KeyUsage | None]:
        """Count a request of a key while the context is active; yields the usage of the key if its tokens are limited.

        Args:
            key: the key of the request.
            generates: whether it uses tokens.

        Raises:
            HTTPException: 429, the key exceeds a limit.
        """
        usage = self._usage.setdefault(key.id, KeyUsage(self, self._clock))
        limit = key.limits.max_requests
        if limit is not None and usage.running >= limit:
            self._on_rejection("max_requests")
            raise _too_many_requests(limit)
        limited = None
        if generates and key.limits.tokens_per_minute is not None:
            usage.tokens_per_minute = key.limits.tokens_per_minute
            if seconds := usage.seconds_until_available():
                self._on_rejection("tokens_per_minute")
                raise _too_many_tokens(usage, seconds)
            limited = usage
        limited_token = _limited_usage.set(limited)
        token = _usage.set(usage)
        try:
            with hold_request():
                yield limited
        finally:
            _usage.reset(token)
            _limited_usage.reset(limited_token)

    def discard_except(self, ids: Collection[str]) -> None:
        """Discard what keys other than those with these ids have used."""
        self._usage = {id_: usage for id_, usage in self._usage.items() if id_ in ids}

    # RequestObserver: called on the engine's event loop, with the context variables of the request

    def prompt_built(self, num_tokens: int) -> None:
        self._use(num_tokens)

    def token_decoded(self) -> None:
        self._use(1)

    def _use(self, num_tokens: int) -> None:
        usage = _limited_usage.get()
        if usage is not None and usage.limiter is self:
            usage.use(num_tokens)


def _too_many_requests(limit: int) -> HTTPException:
    requests = "1 request" if limit == 1 else f"{limit} requests"
    return HTTPException(
        429,
        f"Rate limit reached: this API key can run {requests} at a time. Try again when one has ended.",
        headers={"Retry-After": str(REQUEST_RETRY_SECONDS)},
    )


def _too_many_tokens(usage: KeyUsage, seconds: int) -> HTTPException:
    return HTTPException(
        429,
        f"Rate limit reached: this API key can use {usage.tokens_per_minute} tokens per minute. Try again in"
        f" {seconds} {'second' if seconds == 1 else 'seconds'}.",
        headers={"Retry-After": str(seconds), **usage.headers()},
    )


def _duration(seconds: float) -> str:
    if 0 < seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
