"""The socket of the server: a TCP address or a Unix socket, with or without TLS; and the names of its host."""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dashinfer_vlm_core.errors import ConfigError

ANY = "*"
"""In a list of allowed hosts or origins: all of them."""

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

_HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsConfig:
    """TLS files in PEM format.

    Attributes:
        certificate: the server's certificate chain.
        key: the private key, unless it is in the same file.
        password: the password of the key, if it has one.
        ca_certs: CA certificates; if set, clients must present a certificate signed by one of them.
    """

    certificate: Path
    key: Path | None = None
    password: str | None = None
    ca_certs: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """The address of the server.

    Attributes:
        host, port: a local address; port 0 selects a free port.
        path: path of a Unix socket, used instead of host and port.
        mode: file permissions of the Unix socket.
        tls: TLS files, or None to disable TLS.
        root_path: path prefix that a reverse proxy strips.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    path: Path | None = None
    mode: int = 0o600
    tls: TlsConfig | None = None
    root_path: str = ""

    @property
    def is_public(self) -> bool:
        """Whether other machines may be able to connect."""
        return self.path is None and self.host not in LOOPBACK

    def url(self, listener: socket.socket) -> str:
        """Return the API's base URL for a socket that listens on this address."""
        if self.path is not None:
            return f"unix:{self.path}"
        host, port = listener.getsockname()[:2]
        return f"http{'s' if self.tls else ''}://{f'[{host}]' if ':' in host else host}:{port}{self.root_path}/v1"


@contextmanager
def open_listener(address: Address) -> Iterator[socket.socket]:
    """Bind a socket. On exit, close it and remove the file of a Unix socket.

    Raises:
        ConfigError: the address or the path cannot be used.
    """
    if address.path is not None:
        with _unix(address.path, address.mode) as listener:
            try:
                yield listener
            finally:
                address.path.unlink(missing_ok=True)
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


def _unix(path: Path, mode: int) -> socket.socket:
    _remove_stale_socket(path)
    listener = socket.socket(socket.AF_UNIX)
    previous = os.umask(0o777 & ~mode)  # so that the permissions apply as soon as the file exists
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
