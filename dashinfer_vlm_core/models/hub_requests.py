"""Requests to a hub, with its client's session: proxies, HF_HUB_OFFLINE, and its name of the program. All responses are
bounded."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from ..errors import CheckpointError

if TYPE_CHECKING:
    import httpx

Hub: TypeAlias = Literal["huggingface", "modelscope"]

HUB_VARIABLES: Mapping[Hub, str] = {"huggingface": "HF_ENDPOINT", "modelscope": "MODELSCOPE_DOMAIN"}
"""They name another server."""

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
def open_response(url: str, *, hub: Hub, first_byte: int = 0) -> Iterator[httpx.Response]:
    """Request a file or a list, without compression. Only the Hugging Face Hub receives the user's token; redirects to
    other hosts do not have it.

    Args:
        url: its address.
        hub: the hub.
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
    if hub == "huggingface" and (token := get_token()):
        headers["Authorization"] = f"Bearer {token}"
    with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_SECONDS) as response:
        if response.is_error:
            raise HubRefusal(response.status_code, response.headers.get("X-Error-Code", ""))
        yield response


def get_page(url: str, *, hub: Hub) -> Page:
    """Request JSON.

    Raises:
        CheckpointError: the response is too long, or not JSON.
        HubRefusal, httpx.HTTPError, OSError: as for `open_response`.
    """
    received = bytearray()
    step = f"Check {HUB_VARIABLES[hub]}."
    with open_response(url, hub=hub) as response:
        for block in response.iter_bytes():
            received += block
            if len(received) > MAX_LIST_BYTES:
                raise CheckpointError(f"The list of files from {url} is too long. {step}", param="model")
        next_url = response.links.get("next", {}).get("url", "")
    if next_url and not _has_origin(next_url, url):  # the request for it has the token
        raise CheckpointError(
            f"The list of files from {url} continues at {next_url[:200]!r}, which is invalid, or has another host, port"
            f" or scheme. {step}",
            param="model",
        )
    try:
        return Page(json.loads(received), next_url)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"The response from {url} is not a list of files. {step}", param="model") from error


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
