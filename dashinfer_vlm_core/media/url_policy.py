"""Policy for media URLs: a strict URL parser and a check for public IP addresses."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import TypeAlias
from urllib.parse import urljoin

import httpx

from ..concurrency.fair_slots import FairSlots
from ..config import EngineConfig
from ..errors import MediaRefused, MediaUnreachable
from ..protocol.client import current_client

Resolver: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""Resolves (host name, port) to IP addresses; raises OSError if there are none."""

RESOLVER_THREADS = 8
"""How many names of one client are looked up at a time."""

MAX_URL_CHARS = 65536
"""Maximum length of a URL, which is also the limit of httpx."""

_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_NAT64 = IPv6Network("64:ff9b::/96")
_SPECIAL = (
    IPv4Network("192.88.99.0/24"),  # 6to4 relays, RFC 7526
    IPv4Network("192.0.0.0/24"),  # IETF protocol assignments, RFC 6890; some clouds serve metadata there
    IPv4Network("168.63.129.16/32"),  # Azure platform services, reachable from every virtual machine
    IPv6Network("64:ff9b:1::/48"),  # local-use NAT64, RFC 8215
)


def check_url(text: str, *, path: str, config: EngineConfig, base: httpx.URL | None = None) -> httpx.URL:
    """Parse a URL (relative to `base`, if given) and check everything that needs no name resolution.

    URL parsers disagree on unusual URLs, so these are rejected: user names, white space, backslashes and control
    characters, and hosts that end in a dot, are percent-encoded, or are noncanonical IP addresses (`0x7f.1`).

    Raises:
        MediaRefused: an unusual URL, a scheme other than http and https, or a host that `config` does not allow.
    """
    if not config.allow_remote_media:
        raise MediaRefused("The engine does not fetch media. Send it as a data: URL.", param=path)
    url = _parse(text, base)
    if url is None:
        raise MediaRefused(
            "The URL is not a plain http: or https: URL. Remove user names, spaces, backslashes and unusual host"
            " notations.",
            param=path,
        )
    names = {_host(url), url.host}  # in punycode and in Unicode
    if config.allowed_media_domains and names.isdisjoint(config.allowed_media_domains):
        raise MediaRefused("The engine does not fetch from that host. Send the media as a data: URL.", param=path)
    if is_numeric(url) and not config.allow_private_addresses and not is_public(_host(url)):
        raise _not_public_error(path)
    return url


async def resolve_addresses(url: httpx.URL, resolve: Resolver, *, path: str, config: EngineConfig) -> Sequence[str]:
    """Resolve the URL's host to IP addresses, all of which may be connected to.

    Raises:
        MediaRefused: an address is not public; a host with mixed addresses is rejected.
        MediaUnreachable: the host has no addresses.
    """
    addresses = [_host(url)] if is_numeric(url) else await resolve(_host(url), _port(url))
    if not addresses:
        raise MediaUnreachable("The host of this URL has no address. Check the URL.", param=path)
    if not config.allow_private_addresses and not all(is_public(address) for address in addresses):
        raise _not_public_error(path)
    return addresses


class SystemResolver:
    """The operating system's resolver, which returns addresses in its order of preference.

    A lookup may take half a minute and cannot be interrupted, so lookups have their own threads: slow names delay only
    other names of the same client. The caller sets the time limit.
    """

    def __init__(self) -> None:
        threads = RESOLVER_THREADS + 1  # one client cannot occupy all of them
        self._slots = FairSlots(threads)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="dashinfer-vlm-names")
        self._lookups: set[asyncio.Task[list[str]]] = set()

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        lookup = asyncio.create_task(self._run(host, port))
        self._lookups.add(lookup)
        lookup.add_done_callback(self._lookups.discard)
        try:
            return await asyncio.shield(lookup)
        finally:
            lookup.cancel()

    async def close(self) -> None:
        """Cancel queued lookups; running ones finish in the background."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for lookup in self._lookups:
            lookup.cancel()
        await asyncio.gather(*self._lookups, return_exceptions=True)

    async def _run(self, host: str, port: int) -> list[str]:
        """Look up a name in a thread, which stays occupied until the lookup ends, also after one cancellation."""
        async with self._slots.slot(current_client.get().id, limit=RESOLVER_THREADS):
            lookup = asyncio.get_running_loop().run_in_executor(self._threads, _look_up, host, port)
            try:
                return await asyncio.shield(lookup)
            except asyncio.CancelledError:
                with contextlib.suppress(OSError, UnicodeError):
                    await lookup
                raise


def is_public(text: str) -> bool:
    """Whether an IP address is publicly routable.

    NAT64 addresses are checked by the IPv4 address that they embed; other embeddings of IPv4 are never public.
    """
    address = ip_address(text)
    if isinstance(address, IPv6Address):
        if address in _NAT64:
            return is_public(str(IPv4Address(int(address) & 0xFFFFFFFF)))
        if address.ipv4_mapped or address.sixtofour or address.teredo or address.is_site_local:
            return False
    special = address.is_multicast or address.is_reserved or any(address in network for network in _SPECIAL)
    return address.is_global and not special


def is_numeric(url: httpx.URL) -> bool:
    """Whether the URL's host is an IP address instead of a name."""
    host = _host(url)
    return ":" in host or _NUMBER.fullmatch(host.rpartition(".")[2]) is not None


def _look_up(host: str, port: int) -> list[str]:
    return [str(address[0]) for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def _parse(text: str, base: httpx.URL | None) -> httpx.URL | None:
    # URLs that two parsers could interpret differently are rejected.
    if len(text) > MAX_URL_CHARS or not text.isprintable() or " " in text or "\\" in text:
        return None
    try:
        url = httpx.URL(urljoin(str(base), text) if base else text)
    except (httpx.InvalidURL, ValueError):
        return None
    host = _host(url)
    is_plain = "%" not in host and all(host.split("."))
    if url.scheme not in ("http", "https") or url.userinfo or not is_plain or not 0 < _port(url) < 65536:
        return None
    return url if not is_numeric(url) or _is_canonical(host) else None


def _is_canonical(host: str) -> bool:
    # `getaddrinfo` also accepts decimal, octal, hexadecimal and shortened addresses.
    try:
        return bool(ip_address(host))
    except ValueError:
        return False


def _host(url: httpx.URL) -> str:
    return url.raw_host.decode("ascii")


def _port(url: httpx.URL) -> int:
    return (443 if url.scheme == "https" else 80) if url.port is None else url.port


def _not_public_error(path: str) -> MediaRefused:
    return MediaRefused(
        "The URL resolves to an address that the engine may not fetch from, because it is not public. Use a public URL,"
        " or send the media as a data: URL. Only the operator can allow private addresses: --allow-private-addresses.",
        param=path,
    )
