"""Messages between the engine and a media worker. They are JSON and bytes; nothing is unpickled.

A message is: uint32 (little endian), the length of the head; the head, a JSON object in UTF-8; then the bytes that
the head announces.

    engine -> worker    {"part": fields of MediaPart, "sizes": [bytes per file, ...], "max_tokens": n}, then the files
    worker -> engine    {"ready": process id, "warning": text}  once, when the worker accepts jobs
                        {"failed": text}                        instead: the worker cannot be set up
                        {"patches": {...}, "logs": [...]}       the pixels are in the shared memory
                        {"error": {...}, "logs": [...]}         the request is invalid
                        {"tokens": n, "logs": [...]}            the item has more than `max_tokens` visual tokens
                        {"exception": text, "logs": [...]}      the worker failed in another way

`worker_responses.py` validates what the engine receives.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import RequestError
from ..models.interface import Patches
from ..protocol import MediaPart

LENGTH = struct.Struct("<I")
MAX_HEAD_BYTES = 1 << 20
SMALL_BYTES = 1 << 18
"""Files up to this size in total are copied, to be sent with the head."""


class Disconnected(Exception):
    """The other end was closed."""


def send(sock: socket.socket, head: Mapping[str, Any], data: Sequence[bytes] = ()) -> None:
    """Send a message."""
    body = json.dumps(head, allow_nan=False).encode()
    message = LENGTH.pack(len(body)) + body
    if sum(map(len, data)) <= SMALL_BYTES:
        sock.sendall(b"".join([message, *data]))  # wakes the other end once
        return
    sock.sendall(message)
    for item in data:
        sock.sendall(item)


def receive_head(sock: socket.socket) -> bytes:
    """Receive the JSON text of a head, which is not checked.

    Raises:
        Disconnected: the other end was closed.
        ValueError: it is too long.
    """
    (length,) = LENGTH.unpack(receive(sock, LENGTH.size))
    if length > MAX_HEAD_BYTES:
        raise ValueError("the head is too long")
    return receive(sock, length)


def receive(sock: socket.socket, size: int) -> bytes:
    """Receive exactly `size` bytes.

    Raises:
        Disconnected: the other end was closed.
    """
    data = sock.recv(size, socket.MSG_WAITALL) if size else b""
    if len(data) == size:
        return data
    pieces = [data]  # a socket with a timeout does not wait for all
    while data and (missing := size - sum(map(len, pieces))):
        data = sock.recv(missing, socket.MSG_WAITALL)
        pieces.append(data)
    if not data:
        raise Disconnected
    return b"".join(pieces)


def part_to_json(part: MediaPart) -> dict[str, Any]:
    """Return the fields that decoding depends on; the source itself is replaced by the number of its files."""
    names = (field.name for field in dataclasses.fields(part) if field.name not in ("url", "content", "uuid"))
    return {name: getattr(part, name) for name in names} | {
        "frames": len(part.url) if isinstance(part.url, tuple) else None
    }


def part_from_json(fields: dict[str, Any]) -> MediaPart:
    frames, background = fields.pop("frames"), fields.pop("background")
    url = "data:" if frames is None else ("data:",) * frames
    return MediaPart(**fields, url=url, background=tuple(background) if background else None)


def error_to_json(error: RequestError) -> dict[str, Any]:
    return {"type": type(error).__name__, "message": error.message, "param": error.param, "code": error.code}


def patches_to_json(patches: Patches) -> dict[str, Any]:
    return {
        "shape": list(patches.pixels.shape),
        "grid": list(patches.grid),
        "times": list(patches.times),
        "sampled_fps": patches.sampled_fps,
        "source_size": patches.source_size,
    }
