"""The socket of the server: a TCP address or a Unix socket, with or without TLS; and the names of its host."""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from dashinfer_vlm_core.errors import ConfigError

from .help import OPTIONS

ANY = "*"
"""In a list of allowed hosts or origins: all of them."""

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

_HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?", re.IGNORECASE)


@dataclass(config=OPTIONS, frozen=True, kw_only=True, slots=True)
class Address:
    """The address of the server, with or without TLS.

    Raises:
        ConfigError: there are TLS files without a certificate, or the prefix is not the path of a folder.
    """

    title: ClassVar[str] = "Network"

    host: str = Field(default="127.0.0.1", title="ADDRESS")
    """Address to listen on; 0.0.0.0 for all IPv4 interfaces."""

    port: int = Field(default=8000, ge=0, le=65535, title="PORT")
    """Port to listen on; 0 selects a free port."""

    uds: Path | None = Field(default=None, title="FILE")
    """Unix socket to listen on, instead of host and port. Only the user of the server can connect."""

    root_path: str = Field(default="", title="PATH")
    """Path prefix that a reverse proxy strips."""

    ssl_certfile: Path | None = Field(default=None, title="FILE")
    """Certificate chain of the server; enables TLS."""

    ssl_keyfile: Path | None = Field(default=None, title="FILE")
    """Private key of the certificate, without a password; defaults to the one in the same file."""

    ssl_ca_certs: Path | None = Field(default=None, title="FILE")
    """CA certificates; clients must present a certificate signed by one of them."""

    def __post_init__(self) -> None:
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ConfigError("--ssl-keyfile and --ssl-ca-certs require --ssl-certfile. Set it too.")
        root = self.root_path
        if root and (not root.startswith("/") or root.endswith("/")):
            raise ConfigError(f"--root-path must start with a slash and end without one, such as /vision, got {root}.")

    @property
    def is_public(self) -> bool:
        """Whether other machines may be able to connect."""
        return self.uds is None and self.host not in LOOPBACK

    def url(self, listener: socket.socket) -> str:
        """Return the API's base URL for a socket that listens on this address."""
        if self.uds is not None:
            return f"unix:{self.uds}"
        host, port = listener.getsockname()[:2]
        scheme = "https" if self.ssl_certfile else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{self.root_path}/v1"


@contextmanager
def open_listener(address: Address) -> Iterator[socket.socket]:
    """Bind a socket. On exit, close it and remove the file of a Unix socket.

    Raises:
        ConfigError: the address or the path cannot be used.
    """
    if address.uds is not None:
        with _unix(address.uds) as listener:
            try:
                yield listener
            finally:
                address.uds.unlink(missing_ok=True)
        return
    with _tcp(address.host, address.port) as listener:
        yield listener


def _tcp(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Cannot listen on {host} port {port}: {error.strerror or error}. Choose another --host or --port"
            " (--port 0 selects a free port)."
        ) from error
    return listener


def _unix(path: Path) -> socket.socket:
    _remove_stale_socket(path)
    listener = socket.socket(socket.AF_UNIX)
    previous = os.umask(0o177)  # so that the permissions apply as soon as the file exists
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(f"Cannot listen on {path}: {error.strerror or error}. Choose another --uds.") from error
    finally:
        os.umask(previous)
    return listener


def _remove_stale_socket(path: Path) -> None:
    """Remove the socket file of a server that was killed. Raises ConfigError if it is in use or is another file."""
    if not path.exists():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        in_use = not stat.S_ISSOCK(path.stat().st_mode) or probe.connect_ex(str(path)) != errno.ECONNREFUSED
    if in_use:
        raise ConfigError(f"Cannot listen on {path}: the file exists and is in use. Choose another --uds.")
    path.unlink()


def normalize_allowed_host(host: str) -> str:
    """Return a host name for `CrossOriginMiddleware` in lowercase.

    Raises:
        ConfigError: it is not a host name, `*.domain` or `*`; for example, it contains a port.
    """
    name = host.lower().removesuffix(".")
    if name != ANY and not is_host_name(name.removeprefix("*.")):
        raise ConfigError(
            f"--allowed-hosts must list host names without scheme and port, such as vision.example.com, got {host!r}."
        )
    return name


def is_host_name(text: str) -> bool:
    return _HOST_NAME.fullmatch(text) is not None
