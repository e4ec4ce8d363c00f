"""Which web addresses may be fetched: one strict parser of URLs, and one rule about networks."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import TypeAlias
from urllib.parse import urljoin

import httpx

from ..config import EngineConfig
from ..errors import MediaRefused, MediaUnreachable

Resolver: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host name, port) -> the numeric addresses it has now; raises OSError if it has none."""

RESOLVER_THREADS = 8

_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_NAT64 = IPv6Network("64:ff9b::/96")
_SPECIAL = (
    IPv4Network("192.88.99.0/24"),  # relays of 6to4, RFC 7526
    IPv4Network("192.0.0.0/24"),  # for protocols, RFC 6890; some clouds answer there
    IPv4Network("168.63.129.16/32"),  # Azure's own services, on every virtual machine
    IPv6Network("64:ff9b:1::/48"),  # NAT64 within one site, RFC 8215
)


def check_url(text: str, *, part: str, config: EngineConfig, base: httpx.URL | None = None) -> httpx.URL:
    """The URL that `text` (relative to `base`, if given) names, once nothing about its writing forbids to fetch it.

    Two parsers may disagree on a URL that is written oddly, so odd ones are refused rather than understood: with user
    names, white space, backslashes or control characters, with a host that ends in a dot, is escaped, or is a number in
    disguise (`0x7f.1`).

    Raises:
        MediaRefused: such a URL, another scheme than http and https, a host that `config` does not allow.
    """
    if not config.allow_remote_media:
        raise MediaRefused("This server fetches no media; send it as a data: URL.", param=part)
    url = _parse(text, base)
    if url is None:
        raise MediaRefused("The URL is not a plain http: or https: URL; write it without tricks.", param=part)
    if config.allowed_media_domains and _names(url).isdisjoint(config.allowed_media_domains):
        raise MediaRefused("This server does not fetch from that host; send the media as a data: URL.", param=part)
    if is_numeric(url) and not config.allow_private_addresses and not is_public(_host(url)):
        raise _not_public(part)
    return url


async def addresses(url: httpx.URL, resolve: Resolver, *, part: str, config: EngineConfig) -> Sequence[str]:
    """The numeric addresses of the URL's host, every one of which may be connected to.

    Raises:
        MediaRefused: one of them is not public; a name with mixed answers is refused as a whole.
        MediaUnreachable: there are none.
    """
    found = [_host(url)] if is_numeric(url) else await resolve(_host(url), _port(url))
    if not found:
        raise MediaUnreachable("The host of this URL has no address; check the URL.", param=part)
    if not config.allow_private_addresses and not all(is_public(address) for address in found):
        raise _not_public(part)
    return found


class SystemResolver:
    """The addresses that the operating system's resolver gives, in its order of preference.

    It may take half a minute for a name and cannot be interrupted, so that it has threads of its own: slow names delay
    other names, and nothing else. Who waits for one sets the time limit.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(RESOLVER_THREADS, thread_name_prefix="dashinfer-vlm-names")

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, _look_up, host, port)

    def close(self) -> None:
        """Look up no more names; a lookup that runs is left to end by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def is_public(text: str) -> bool:
    """Whether a numeric address belongs to the public internet; an IPv4 address inside an IPv6 one decides for both."""
    address = ip_address(text)
    if isinstance(address, IPv6Address):
        if address in _NAT64:
            return is_public(str(IPv4Address(int(address) & 0xFFFFFFFF)))
        if address.ipv4_mapped or address.sixtofour or address.teredo or address.is_site_local:
            return False
    special = address.is_multicast or address.is_reserved or any(address in network for network in _SPECIAL)
    return address.is_global and not special


def is_numeric(url: httpx.URL) -> bool:
    """Whether the URL's host is an address already, not a name."""
    host = _host(url)
    return ":" in host or _NUMBER.fullmatch(host.rpartition(".")[2]) is not None


def _look_up(host: str, port: int) -> list[str]:
    return [str(address[0]) for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def _parse(text: str, base: httpx.URL | None) -> httpx.URL | None:
    """None for whatever two parsers could read differently."""
    if not text.isprintable() or " " in text or "\\" in text:
        return None
    try:
        url = httpx.URL(urljoin(str(base), text) if base else text)
    except (httpx.InvalidURL, ValueError):
        return None
    if url.scheme not in ("http", "https") or url.userinfo or not _is_plain(_host(url)) or not 0 < _port(url) < 65536:
        return None
    return url if not is_numeric(url) or _is_canonical(_host(url)) else None


def _is_plain(host: str) -> bool:
    return bool(host) and "%" not in host and all(host.split("."))


def _is_canonical(host: str) -> bool:
    """Refuses decimal, octal, hexadecimal and shortened IPv4 addresses, which `getaddrinfo` would understand."""
    try:
        return bool(ip_address(host))
    except ValueError:
        return False


def _host(url: httpx.URL) -> str:
    return url.raw_host.decode("ascii")


def _names(url: httpx.URL) -> set[str]:
    """The host as it travels (punycode) and as people write it."""
    return {_host(url), url.host}


def _port(url: httpx.URL) -> int:
    return (443 if url.scheme == "https" else 80) if url.port is None else url.port


def _not_public(part: str) -> MediaRefused:
    return MediaRefused(
        "The URL leads to an address that this server may not fetch from; use a public one.", param=part
    )
