"""OpenAI's batch files: requests and responses as lines of JSON, appended so that an interrupted run can resume."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dashinfer_vlm_core.errors import ConfigError, DashInferVLMError

if TYPE_CHECKING:
    from typing_extensions import Self

URL = "/v1/chat/completions"
LINE_PREFIX = b'{"id": "batch_req_'
"""Prefix of each output line, which distinguishes an incomplete last line from a line of an unrelated file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """The position of a request in its file. Bodies with images are too large to keep all of them in memory.

    Attributes:
        custom_id: the caller's name for the request, unique in the file.
        offset: first byte of its line.
        line_id: the `id` of its output line: a digest of `custom_id` and body, independent of the order of keys.
    """

    custom_id: str
    offset: int
    line_id: str


def read_entries(path: Path) -> list[Entry]:
    """Read and validate all requests of a file.

    Raises:
        ConfigError: the file cannot be read, or a line is not a request; the message names the line.
    """
    entries: list[Entry] = []
    lines: dict[str, int] = {}
    for number, offset, line in _lines(path):
        location = f"{path}, line {number}"
        request = _parse_request(line, location)
        custom_id = request["custom_id"]
        if custom_id in lines:
            raise ConfigError(f"{location}: the custom_id {custom_id!r} is also used in line {lines[custom_id]}.")
        lines[custom_id] = number
        entries.append(Entry(custom_id=custom_id, offset=offset, line_id=_line_id(request)))
    return entries


def read_body(path: Path, entry: Entry) -> dict[str, Any]:
    """Read the body of a request.

    Raises:
        ConfigError: the file has changed since `read_entries`.
    """
    with path.open("rb") as file:
        file.seek(entry.offset)
        request = _parse_request(file.readline(), str(path))
    if _line_id(request) != entry.line_id:
        raise ConfigError(f"{path} changed during the run. Run the batch again.")
    body: dict[str, Any] = request["body"]
    return body


def response_line(entry: Entry, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the output line of a completed request; `body` is the chat completion."""
    response = {"status_code": HTTPStatus.OK.value, "request_id": body["id"], "body": body}
    return {"id": entry.line_id, "custom_id": entry.custom_id, "response": response, "error": None}


def error_line(entry: Entry, error: DashInferVLMError) -> dict[str, Any]:
    """Return the output line of a failed request."""
    details = {"code": error.code, "message": str(error), "param": error.param}
    return {"id": entry.line_id, "custom_id": entry.custom_id, "response": None, "error": details}


class BatchOutput:
    """An output file of a batch. One process at a time appends complete lines, in any order.

    An incomplete last line is dropped, so that its request is sent again.

    Args:
        path: the file; it is created if it does not exist.
        overwrite: whether to discard existing lines instead of appending to them.

    Attributes:
        completed: the custom_ids in the file when it was opened, with the `id` of the last line of each.

    Raises:
        ConfigError: the file cannot be written, another process is writing it, or it is not a batch output. It is not
            modified.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self.path = path
        self._file = _open_locked(path)
        try:
            self.completed, incomplete = _read(path)
            if overwrite or incomplete:
                os.ftruncate(self._file, 0 if overwrite else path.stat().st_size - incomplete)
        except BaseException:
            os.close(self._file)
            raise

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line.

        Raises:
            ConfigError: the disk is full, or not available.
        """
        data = json.dumps(line, ensure_ascii=False).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be written: {error.strerror}. Run the batch again to resume."
            ) from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a pipe, for example, cannot be synced
            os.fsync(self._file)
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_locked(path: Path) -> int:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Choose another file.") from error
    problem = "" if path.is_file() else "is not a regular file. Choose another file."
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        problem = "is being written by another batch. Wait for it to finish, or choose another file."
    if problem:
        os.close(file)
        raise ConfigError(f"{path} {problem}")
    return file


def _read(path: Path) -> tuple[dict[str, str], int]:
    """Return the `id` of the last line of each custom_id, and the number of bytes of an incomplete last line."""
    completed: dict[str, str] = {}
    for number, _, line in _lines(path):
        if not line.endswith(b"\n") and line.startswith(LINE_PREFIX[: len(line)]):
            return completed, len(line)
        custom_id, line_id = _parse_ids(line, f"{path}, line {number}")
        completed[custom_id] = line_id
    return completed, 0


def _parse_ids(line: bytes, location: str) -> tuple[str, str]:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        output = json.loads(line)
        if {"response", "error"} <= set(output):
            return str(output["custom_id"]), str(output["id"])
    raise ConfigError(f"{location} is not an output line of a batch. Choose another output file.")


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield number, offset and bytes of each line that is not blank."""
    try:
        with path.open("rb") as file:
            offset = 0
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, offset, line
                offset += len(line)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error


def _parse_request(line: bytes, location: str) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{location} is not valid JSON: {error}.") from None
    if not isinstance(request, dict) or not isinstance(request.get("custom_id"), str):
        raise ConfigError(f"{location} has no custom_id. Each line must be a request in OpenAI's batch format.")
    if request.get("method") != "POST" or request.get("url") != URL:
        raise ConfigError(f"{location}: `method` must be POST, and `url` must be {URL}.")
    if not isinstance(request.get("body"), dict) or request["body"].get("stream"):
        raise ConfigError(f"{location}: `body` must be a chat completion request without `stream`.")
    return request


def _line_id(request: Mapping[str, Any]) -> str:
    """Return a digest of a request that does not depend on the order of keys. OpenAI's format leaves the id open."""
    canonical = json.dumps([request["custom_id"], request["body"]], sort_keys=True)
    return f"batch_req_{hashlib.sha256(canonical.encode()).hexdigest()[:32]}"
