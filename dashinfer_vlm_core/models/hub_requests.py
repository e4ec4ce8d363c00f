"""Requests to a hub, with its client's session: proxies, HF_HUB_OFFLINE, and its name of the program. All responses are
bounded."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CheckpointError

if TYPE_CHECKING:
    import httpx

MAX_LIST_BYTES = 20 * 10**6
"""Of a list of files. The longest ones of published checkpoints have less than 1 MB."""

TIMEOUT_SECONDS = 30.0
"""Without data."""


class HubRefusal(Exception):
    """A hub responded with an error.

    Attributes:
        status: the HTTP status.
        code: the hub's own code, such as `GatedRepo`; empty if it has none.
    """

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}".strip())
        self.status = status
        self.code = code


class Page(NamedTuple):
    """A JSON response, and the address of the next one; empty if there is none."""

    content: Any
    next_url: str


@contextlib.contextmanager
def open_response(url: str, *, sends_token: bool, first_byte: int = 0) -> Iterator[httpx.Response]:
    """Request a file or a list, without compression; redirects to other hosts do not have the token.

    Args:
        url: its address.
        sends_token: whether to send the user's token of Hugging Face.
        first_byte: where the response should begin; whether it does, its status states.

    Raises:
        HubRefusal: the response is an error.
        httpx.HTTPError: there is none.
        OSError: HF_HUB_OFFLINE is set.
    """
    from huggingface_hub import get_session, get_token

    headers = {"Accept-Encoding": "identity"}
    if first_byte:
        headers["Range"] = f"bytes={first_byte}-"
    if sends_token and (token := get_token()):
        headers["Authorization"] = f"Bearer {token}"
    with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_SECONDS) as response:
        if response.is_error:
            raise HubRefusal(response.status_code, response.headers.get("X-Error-Code", ""))
        yield response


def get_page(url: str, *, sends_token: bool) -> Page:
    """Request JSON.

    Raises:
        CheckpointError: the response is too long, or not JSON.
        HubRefusal, httpx.HTTPError, OSError: as for `open_response`.
    """
    received = bytearray()
    with open_response(url, sends_token=sends_token) as response:
        for block in response.iter_bytes():
            received += block
            if len(received) > MAX_LIST_BYTES:
                raise CheckpointError(f"The list of files from {url} is too long. Check HF_ENDPOINT.", param="model")
        next_url = response.links.get("next", {}).get("url", "")
    if next_url and not _has_origin(next_url, url):  # the request for it has the token
        raise CheckpointError(
            f"The list of files from {url} continues at {next_url[:200]!r}, which is invalid, or has another host, port"
            " or scheme. Check HF_ENDPOINT.",
            param="model",
        )
    try:
        return Page(json.loads(received), next_url)
    except ValueError as error:
        raise CheckpointError(
            f"The response from {url} is not a list of files. Check HF_ENDPOINT.", param="model"
        ) from error


def _has_origin(url: str, other: str) -> bool:
    import httpx

    try:
        return _origin(url) == _origin(other)
    except httpx.InvalidURL:
        return False


def _origin(url: str) -> tuple[str, str, int | None]:
    import httpx

    parsed = httpx.URL(url)
    return parsed.scheme, parsed.host, parsed.port  # None also if the scheme's default port is written
