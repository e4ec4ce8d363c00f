"""Fetch http and https sources within the server's limits on hosts, bytes and seconds."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

import anyio
import httpx

from ..concurrency.fair_slots import FairSlots
from ..config import EngineConfig
from ..errors import MediaError, MediaRefused, MediaTooLarge, MediaUnreachable, QueueFull
from ..protocol.client import current_client
from ..version import __version__
from .types import Kind
from .url_policy import Resolver, SystemResolver, check_url, resolve_addresses

MAX_REDIRECTS = 3
MAX_ADDRESSES = 3
CONNECT_SECONDS = 3.0
SILENCE_SECONDS = 10.0

HEADERS = {
    "User-Agent": f"dashinfer-vlm/{__version__}",
    "Accept": "*/*",
    "Accept-Encoding": "identity",  # a compressed body could grow without bound after it was counted
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchStats:
    """Counters of a `Fetcher`.

    Attributes:
        fetched: sources fetched completely.
        failed: sources that failed for any reason except cancellation by the caller.
        bytes: total size of the sources fetched completely.
    """

    fetched: int = 0
    failed: int = 0
    bytes: int = 0


class ByteBudget:
    """Bytes that may be fetched for one request."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0

    def consume(self, size: int, path: str) -> None:
        """Count received bytes.

        Raises:
            MediaTooLarge: the request has received more than its limit.
        """
        self._used += size
        if self._used > self._limit:
            raise MediaTooLarge(
                f"The media of the request exceeds {self._limit} bytes in total. Send fewer or smaller items.",
                param=path,
            )


class Fetcher:
    """Fetches media URLs, at most `Limits.max_fetches` of a client at a time. Other clients have one more together, so
    that one client's slow URLs cannot delay all others, and waiting clients get free slots in turn.

    Each hop is resolved once, its addresses are checked, and the connection goes to a checked address with the original
    host name in the Host header and in TLS, which prevents DNS rebinding. A transport is used instead of a client,
    because a client keeps cookies, follows redirects and reads proxies from the environment. Connections are not
    reused: the pool is keyed by address, and another host at the same address must present its own certificate.

    Args:
        config: limits on bytes, seconds, hosts and addresses.
        resolve: resolves host names; defaults to the operating system's resolver.
        transport: connects to the addresses.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        resolve: Resolver | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._config = config
        self._system = SystemResolver()
        self._resolve = resolve or self._system
        self._slots = FairSlots(config.limits.max_fetches + 1)
        self._counts: Counter[str] = Counter()  # fields of FetchStats
        self._transport = transport or direct_transport()

    @property
    def stats(self) -> FetchStats:
        return FetchStats(**self._counts)

    async def get(self, url: httpx.URL, *, kind: Kind, path: str, budget: ByteBudget | None = None) -> bytes:
        """Fetch the body of `url`, which must have passed `check_url`.

        Args:
            url: the URL to fetch.
            kind: selects the size and time limits.
            path: the part's path in the request, used in errors.
            budget: the request's byte budget; defaults to a new one.

        Raises:
            MediaRefused: a redirect or address is forbidden, or there are too many redirects.
            MediaTooLarge: the body exceeds the limit of its kind, or the request exceeds its budget.
            MediaUnreachable: the response is incomplete, late, or not the media.
            QueueFull: no fetch slot became free within the time limit of this fetch.
        """
        seconds = self._config.image_fetch_timeout if kind == "image" else self._config.video_fetch_timeout
        async with self._slot(seconds):
            body = await self._fetch(
                url, kind, path, budget or ByteBudget(self._config.limits.max_fetched_bytes), seconds
            )
        self._counts["fetched"] += 1
        self._counts["bytes"] += len(body)
        return body

    async def close(self) -> None:
        await self._system.close()
        await self._transport.aclose()

    @contextlib.asynccontextmanager
    async def _slot(self, seconds: float) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            try:
                with anyio.fail_after(seconds):
                    slot = self._slots.slot(current_client.get().id, limit=self._config.limits.max_fetches)
                    await stack.enter_async_context(slot)
            except TimeoutError:
                raise QueueFull("Too many images and videos are being fetched. Try again in a moment.") from None
            yield

    async def _fetch(self, url: httpx.URL, kind: Kind, path: str, budget: ByteBudget, seconds: float) -> bytes:
        try:
            with anyio.fail_after(seconds):  # `asyncio.wait_for` may lose a cancellation, see `concurrency/deadline.py`
                return await self._follow(url, kind, path, budget)
        except (httpx.HTTPError, OSError, UnicodeError) as error:  # a timeout is an OSError
            self._counts["failed"] += 1
            raise MediaUnreachable(
                "The media could not be fetched: the connection failed, or took too long. Check the URL, or send a"
                " data: URL.",
                param=path,
            ) from error
        except MediaError:
            self._counts["failed"] += 1
            raise

    async def _follow(self, url: httpx.URL, kind: Kind, path: str, budget: ByteBudget) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            response = await self._request(url, path)
            try:
                if not response.has_redirect_location:
                    return await self._read_body(response, kind, path, budget)
            finally:
                await response.aclose()
            url = check_url(response.headers["Location"], path=path, config=self._config, base=url)
        raise MediaRefused("The URL redirects too often. Send the final URL.", param=path)

    async def _request(self, url: httpx.URL, path: str) -> httpx.Response:
        addresses = await resolve_addresses(url, self._resolve, path=path, config=self._config)
        *first, last = addresses[:MAX_ADDRESSES]
        for address in first:
            with contextlib.suppress(httpx.ConnectError, httpx.ConnectTimeout):
                return await self._transport.handle_async_request(_request_to(address, url))
        return await self._transport.handle_async_request(_request_to(last, url))

    async def _read_body(self, response: httpx.Response, kind: Kind, path: str, budget: ByteBudget) -> bytes:
        if response.status_code != httpx.codes.OK:
            raise MediaUnreachable("The host of this URL did not return the media. Check the URL.", param=path)
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise MediaUnreachable("The host of this URL sends compressed content. Send a data: URL.", param=path)
        limit = self._config.image_max_bytes if kind == "image" else self._config.video_max_bytes
        if int(response.headers.get("Content-Length", 0)) > limit:
            raise too_large_error(limit, path)
        chunks = []
        size = 0
        async for chunk in response.aiter_raw():
            size += len(chunk)
            budget.consume(len(chunk), path)
            if size > limit:
                raise too_large_error(limit, path)
            chunks.append(chunk)
        return await asyncio.to_thread(b"".join, chunks)  # joining 200 MB would block the event loop


def direct_transport(tls: ssl.SSLContext | None = None) -> httpx.AsyncHTTPTransport:
    """Create a transport without proxies or connection reuse.

    Args:
        tls: trusted certificates; defaults to the default CA certificates.
    """
    return httpx.AsyncHTTPTransport(
        verify=tls or _default_certificates(),
        trust_env=False,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
    )


@functools.cache
def _default_certificates() -> ssl.SSLContext:
    # All transports share them: reading them takes 20 ms.
    return httpx.create_ssl_context(trust_env=False)


def _request_to(address: str, url: httpx.URL) -> httpx.Request:
    # It connects to the address, but keeps the Host header and the TLS name of the URL.
    timeouts = httpx.Timeout(CONNECT_SECONDS, read=SILENCE_SECONDS).as_dict()
    return httpx.Request(
        "GET",
        url.copy_with(host=address),
        headers={"Host": url.netloc.decode("ascii"), **HEADERS},
        extensions={"timeout": timeouts, "sni_hostname": url.raw_host.decode("ascii")},
    )


def too_large_error(limit: int, path: str) -> MediaTooLarge:
    return MediaTooLarge(f"The media exceeds {limit} bytes. Send a smaller file.", param=path)
