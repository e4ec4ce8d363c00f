"""OpenAI's batch files: requests and answers as lines of JSON, appended so that a run that was cut off can go on."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dashinfer_vlm_core.errors import ConfigError, DashInferVLMError

if TYPE_CHECKING:
    from typing_extensions import Self

URL = "/v1/chat/completions"
BEGINNING = b'{"id": "batch_req_'
"""How each line that is written here begins: what is left of one can be told from a line of another file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Where a request stands in its file: bodies with pictures are too large to hold them all.

    Attributes:
        custom_id: the caller's name for it, unique in the file.
        offset: first byte of its line.
        line_id: the `id` of lines that answer it: a digest of its name and body, however they are written.
    """

    custom_id: str
    offset: int
    line_id: str


def read_entries(path: Path) -> list[Entry]:
    """Every request of a file, which is checked whole before the first is asked.

    Raises:
        ConfigError: the file cannot be read, or a line is no request; the message names the line.
    """
    entries: list[Entry] = []
    lines: dict[str, int] = {}
    for number, offset, line in _lines(path):
        where = f"{path}, line {number}"
        request = _checked(line, where)
        custom_id = request["custom_id"]
        if custom_id in lines:
            raise ConfigError(f"{where}: the custom_id {custom_id!r} is that of line {lines[custom_id]} too.")
        lines[custom_id] = number
        entries.append(Entry(custom_id=custom_id, offset=offset, line_id=_line_id(request)))
    return entries


def read_body(path: Path, entry: Entry) -> dict[str, Any]:
    """The body of a request, read again.

    Raises:
        ConfigError: the file was changed meanwhile.
    """
    with path.open("rb") as file:
        file.seek(entry.offset)
        request = _checked(file.readline(), str(path))
    if _line_id(request) != entry.line_id:
        raise ConfigError(f"{path} was changed while it was read. Run the batch again.")
    body: dict[str, Any] = request["body"]
    return body


def answered(entry: Entry, body: Mapping[str, Any]) -> dict[str, Any]:
    """The line of an answer; `body` is the chat completion."""
    response = {"status_code": HTTPStatus.OK.value, "request_id": body["id"], "body": body}
    return {"id": entry.line_id, "custom_id": entry.custom_id, "response": response, "error": None}


def failed(entry: Entry, error: DashInferVLMError) -> dict[str, Any]:
    """The line of a request that has no answer."""
    fault = {"code": error.code, "message": error.message, "param": error.param}
    return {"id": entry.line_id, "custom_id": entry.custom_id, "response": None, "error": fault}


class BatchOutput:
    """A file of lines of a batch that one process at a time appends to: whole lines only, in any order.

    A line at the end that was cut off is dropped; its request is to be asked again.

    Args:
        path: the file; it is made where it is not there.
        fresh: whether to begin anew, instead of going on behind what is there.

    Attributes:
        done: the custom_ids that the file holds, with the `id` of the last line of each.
        superseded: whether it held, when it was opened, lines that later ones have replaced.

    Raises:
        ConfigError: it cannot be written, another process writes it, or it holds something else, which stays as it is.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self.path = path
        self._file = _locked(path)
        try:
            self.done: dict[str, str]
            self.superseded: bool
            self.done, self.superseded, torn = _read(path)
            if fresh or torn:
                os.ftruncate(self._file, 0 if fresh else path.stat().st_size - torn)
        except BaseException:
            os.close(self._file)
            raise

    def append(self, line: Mapping[str, Any]) -> None:
        """Raises ConfigError if the disk is full or gone."""
        data = json.dumps(line, ensure_ascii=False).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}. Run it again to go on.") from error

    def compact(self) -> None:
        """Drop each line that a later one of the same custom_id has replaced: the file is written anew beside, and
        moved. To be called last.

        Raises ConfigError if that cannot be done; the file stays as it is.
        """
        where = self.path.resolve()
        partial = where.with_name(f".{where.name}.partial")
        last = {_name(line, str(where))[0]: number for number, _, line in _lines(where)}
        kept = frozenset(last.values())
        try:
            partial.unlink(missing_ok=True)
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.writelines(line for number, _, line in _lines(where) if number in kept)
                os.fsync(file.fileno())
            shutil.copymode(where, partial)
            partial.replace(where)
        except OSError as error:
            partial.unlink(missing_ok=True)
            fault = (
                f"{where} still holds answers to requests that were changed: {error.strerror}. The later ones count."
            )
            raise ConfigError(fault) from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a pipe, or another thing without a disk behind it
            os.fsync(self._file)
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _locked(path: Path) -> int:
    """The file, opened for one process."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Choose another file.") from error
    try:
        if not path.is_file():
            raise ConfigError(f"{path} is no file that a batch can go on with. Choose another file.")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(file), path.stat()):
            raise BlockingIOError  # another batch has just put a new file there
    except BaseException as error:
        os.close(file)
        if isinstance(error, (BlockingIOError, FileNotFoundError)):
            raise ConfigError(f"{path} is being written by another batch. Wait for it, or choose another.") from None
        raise
    return file


class _Found(NamedTuple):
    """What a file of ours holds: the custom_ids with the `id` of the last line of each, whether there are more lines
    than those, and the bytes of a line at its end that was cut off."""

    done: dict[str, str]
    superseded: bool
    torn: int


def _read(path: Path) -> _Found:
    found, lines = dict[str, str](), 0
    for number, _, line in _lines(path):
        if not line.endswith(b"\n") and line.startswith(BEGINNING[: len(line)]):
            return _Found(found, lines > len(found), len(line))
        custom_id, line_id = _name(line, f"{path}, line {number}")
        found[custom_id] = line_id
        lines += 1
    return _Found(found, lines > len(found), 0)


def _name(line: bytes, where: str) -> tuple[str, str]:
    """The custom_id and the id of a line of ours."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        read = json.loads(line)
        if {"response", "error"} <= set(read):
            return str(read["custom_id"]), str(read["id"])
    raise ConfigError(f"{where} is no answer of a batch. Write to another file.")


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and bytes of each line that is not blank."""
    try:
        with path.open("rb") as file:
            offset = 0
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, offset, line
                offset += len(line)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error


def _checked(line: bytes, where: str) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON: {error}.") from None
    if not isinstance(request, dict) or not isinstance(request.get("custom_id"), str):
        raise ConfigError(f"{where} has no custom_id: each line is a request of OpenAI's batch format.")
    if request.get("method") != "POST" or request.get("url") != URL:
        raise ConfigError(f"{where}: `method` has to be POST, and `url` {URL}: nothing else is answered here.")
    if not isinstance(request.get("body"), dict) or request["body"].get("stream"):
        raise ConfigError(f"{where}: `body` has to be the request, without `stream`.")
    return request


def _line_id(request: Mapping[str, Any]) -> str:
    """The same for the same request, in whatever order its keys stand: OpenAI's format leaves it to whoever answers."""
    asked = json.dumps([request["custom_id"], request["body"]], sort_keys=True)
    return f"batch_req_{hashlib.sha256(asked.encode()).hexdigest()[:32]}"
