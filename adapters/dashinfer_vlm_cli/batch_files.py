"""OpenAI's batch files: requests and responses as lines of JSON, appended so that an interrupted run can resume."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from dashinfer_vlm_core.errors import ConfigError, DashInferVLMError

from .line_file import LineFile, read_lines

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
    for number, offset, line in read_lines(path):
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


class BatchOutput(LineFile):
    """An output file of a batch, whose lines are in any order.

    Args:
        path: the file; it is created if it does not exist.
        overwrite: whether to discard existing lines instead of appending to them.

    Attributes:
        completed: the custom_ids in the file when it was opened, with the `id` of the last line of each.

    Raises:
        ConfigError: as `LineFile`, or the file is not a batch output.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self.completed: dict[str, str] = {}
        super().__init__(path, prefix=LINE_PREFIX, read=self._read, overwrite=overwrite)

    def _read(self, line: bytes, location: str) -> None:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            output = json.loads(line)
            if {"response", "error"} <= set(output):
                self.completed[str(output["custom_id"])] = str(output["id"])
                return
        raise ConfigError(f"{location} is not an output line of a batch. Choose another output file.")


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
