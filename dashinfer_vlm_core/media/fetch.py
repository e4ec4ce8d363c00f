"""http and https sources -> bytes, on the terms of this server: what it may reach, how much, how long."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import anyio
import httpx

from ..config import EngineConfig
from ..errors import MediaError, MediaRefused, MediaTooLarge, MediaUnreachable, QueueFull
from ..version import __version__
from .types import Kind
from .url_policy import Resolver, SystemResolver, addresses, check_url

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
    """What a `Fetcher` has done so far.

    Attributes:
        fetched: sources that came whole.
        failed: sources that did not, for whatever reason but a caller that left.
        bytes: of those that came whole.
    """

    fetched: int = 0
    failed: int = 0
    bytes: int = 0


class ByteBudget:
    """Bytes that may still be fetched for one request."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0

    def take(self, size: int, part: str) -> None:
        """Count bytes that came.

        Raises:
            MediaTooLarge: those of the request are too many.
        """
        self._taken += size
        if self._taken > self._limit:
            raise MediaTooLarge(
                f"The media of the request has more than {self._limit} bytes together; send fewer or smaller ones.",
                param=part,
            )


class Fetcher:
    """Fetches the media of users; at most `config.max_fetches` at the same time.

    Each hop is resolved once, its addresses are checked, and the connection goes to an address that was checked, under
    the host's own name: a resolver that changes its answers gains nothing. It drives a transport rather than a client,
    because a client would keep cookies, follow redirects by itself and read proxies from the environment. Connections
    are not kept: a kept one belongs to an address, and the next host at that address must prove its own name.

    Args:
        config: limits of bytes, seconds, hosts and addresses.
        resolve: finds the addresses of a host name; the operating system does by default.
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
        self._slots = asyncio.Semaphore(config.max_fetches)
        self._fetched = self._failed = self._bytes = 0
        self._transport = transport or direct_transport()

    @property
    def stats(self) -> FetchStats:
        return FetchStats(fetched=self._fetched, failed=self._failed, bytes=self._bytes)

    async def get(self, url: httpx.URL, *, kind: Kind, part: str, allowance: ByteBudget | None = None) -> bytes:
        """The body behind `url`, which `check_url` has passed.

        Args:
            url: where it is.
            kind: says which limits it has.
            part: where it stands in the request.
            allowance: of the request, which it is counted against.

        Raises:
            MediaRefused: a redirect or an address that is forbidden, or too many redirects.
            MediaTooLarge: the body exceeds the limit of its kind, or all bodies of the request their allowance.
            MediaUnreachable: no whole answer in time, or an answer that is not the media.
            QueueFull: no other fetch came to its end for as long as this one may take.
        """
        seconds = self._config.image_fetch_timeout if kind == "image" else self._config.video_fetch_timeout
        await self._take_slot(seconds)
        try:
            with anyio.fail_after(seconds):  # `asyncio.wait_for` may lose a cancellation, see `deadline`
                body = await self._follow(url, kind, part, allowance or ByteBudget(self._config.max_fetched_bytes))
        except (httpx.HTTPError, OSError, UnicodeError) as error:  # a timeout is an OSError
            self._failed += 1
            raise MediaUnreachable(
                "The media could not be fetched whole and in time; check the URL, or send a data: URL.", param=part
            ) from error
        except MediaError:
            self._failed += 1
            raise
        finally:
            self._slots.release()
        self._fetched += 1
        self._bytes += len(body)
        return body

    async def close(self) -> None:
        self._system.close()
        await self._transport.aclose()

    async def _take_slot(self, seconds: float) -> None:
        try:
            with anyio.fail_after(seconds):
                await self._slots.acquire()
        except TimeoutError:
            raise QueueFull("Too many pictures and videos are being fetched: try again in a moment.") from None

    async def _follow(self, url: httpx.URL, kind: Kind, part: str, allowance: ByteBudget) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            response = await self._request(url, part)
            try:
                if not response.has_redirect_location:
                    return await self._body(response, kind, part, allowance)
            finally:
                await response.aclose()
            url = check_url(response.headers["Location"], part=part, config=self._config, base=url)
        raise MediaRefused("The URL redirects too often; give the final one.", param=part)

    async def _request(self, url: httpx.URL, part: str) -> httpx.Response:
        """One hop: the head of the answer from the first address that accepts a connection."""
        found = await addresses(url, self._resolve, part=part, config=self._config)
        return await self._first(url, found[:MAX_ADDRESSES])

    async def _first(self, url: httpx.URL, found: Sequence[str]) -> httpx.Response:
        for address in found[:-1]:
            with suppress(httpx.ConnectError, httpx.ConnectTimeout):
                return await self._transport.handle_async_request(_request_to(address, url))
        return await self._transport.handle_async_request(_request_to(found[-1], url))

    async def _body(self, response: httpx.Response, kind: Kind, part: str, allowance: ByteBudget) -> bytes:
        if response.status_code != httpx.codes.OK:
            raise MediaUnreachable("The host of this URL did not answer with the media; check the URL.", param=part)
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise MediaUnreachable("The host of this URL compresses what it sends; send a data: URL.", param=part)
        limit = self._config.image_max_bytes if kind == "image" else self._config.video_max_bytes
        if int(response.headers.get("Content-Length", 0)) > limit:
            raise too_large(limit, part)
        return await _read(response, limit, part, allowance)


def direct_transport(tls: ssl.SSLContext | None = None) -> httpx.AsyncHTTPTransport:
    """Connects to where it is told, without proxies, and keeps no connection; `tls` says whom to trust, else the public
    authorities."""
    return httpx.AsyncHTTPTransport(
        verify=tls or True,
        trust_env=False,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
    )


async def _read(response: httpx.Response, limit: int, part: str, allowance: ByteBudget) -> bytes:
    chunks, size = [], 0
    async for chunk in response.aiter_raw():
        size += len(chunk)
        allowance.take(len(chunk), part)
        if size > limit:
            raise too_large(limit, part)
        chunks.append(chunk)
    return await asyncio.to_thread(b"".join, chunks)  # 200 MB would hold up the loop


def _request_to(address: str, url: httpx.URL) -> httpx.Request:
    """A request for `url` that connects to `address`, with the Host and the TLS name that `url` has."""
    timeouts = httpx.Timeout(CONNECT_SECONDS, read=SILENCE_SECONDS).as_dict()
    return httpx.Request(
        "GET",
        url.copy_with(host=address),
        headers={"Host": url.netloc.decode("ascii"), **HEADERS},
        extensions={"timeout": timeouts, "sni_hostname": url.raw_host.decode("ascii")},
    )


def too_large(limit: int, part: str) -> MediaTooLarge:
    return MediaTooLarge(f"The media has more than {limit} bytes; send a smaller one.", param=part)
