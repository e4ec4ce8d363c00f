"""Where the server listens: an address or a path, with or without TLS."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dashinfer_vlm_core.errors import ConfigError

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """Files of TLS, in PEM.

    Attributes:
        certificate: the server's, with its chain.
        key: of the certificate, unless it is in the same file.
        password: of the key, if it has one.
        client_authorities: who signs the certificates that clients must then bring.
    """

    certificate: Path
    key: Path | None = None
    password: str | None = None
    client_authorities: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """What the server listens on.

    Attributes:
        host, port: an address of this machine; port 0 is a free one.
        path: a Unix socket in place of them.
        mode: who may connect to it, as its file's permissions.
        tls: encrypts, if it is there.
        root_path: prefix that a proxy in front takes off the paths of requests.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    path: Path | None = None
    mode: int = 0o600
    tls: Tls | None = None
    root_path: str = ""

    @property
    def public(self) -> bool:
        """Whether other machines may reach it."""
        return self.path is None and self.host not in LOOPBACK

    def url(self, listener: socket.socket) -> str:
        """Where clients find a socket that was opened for it."""
        if self.path is not None:
            return f"unix:{self.path}"
        host, port = listener.getsockname()[:2]
        return f"http{'s' if self.tls else ''}://{f'[{host}]' if ':' in host else host}:{port}{self.root_path}/v1"


@contextmanager
def opened(address: Address) -> Iterator[socket.socket]:
    """A socket that is bound, closed in the end, and whose file, if it has one, is gone then.

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
            " (--port 0 takes a free one)."
        ) from error
    return listener


def _unix(path: Path, mode: int) -> socket.socket:
    _clear(path)
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o777 & ~mode)  # no moment at which others could connect
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(f"Cannot listen on {path}: {error.strerror or error}. Choose another --uds.") from error
    finally:
        os.umask(before)
    return listener


def _clear(path: Path) -> None:
    """Remove the socket of a server that was killed; that of one that lives is not ours to take."""
    if not path.exists():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        taken = not stat.S_ISSOCK(path.stat().st_mode) or probe.connect_ex(str(path)) != errno.ECONNREFUSED
    if taken:
        raise ConfigError(f"Cannot listen on {path}: it is there already, and in use. Choose another --uds.")
    path.unlink()
