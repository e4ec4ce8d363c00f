"""The files of `embed`: what it reads, the vectors in NumPy's format, and lines of JSON that say what the rows are."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dashinfer_vlm_core.errors import ConfigError, MediaUndecodable, MediaUnreachable

from .line_file import LineFile, write_error
from .media import Kind, Part, data_part, media_kind

if TYPE_CHECKING:
    from dashinfer_vlm_core.engine import PoolingResult

VECTORS_SUFFIX = ".npy"
ROWS_SUFFIX = ".jsonl"
LINE_PREFIX = b'{"row": '

_MAGIC = b"\x93NUMPY\x01\x00"
HEADER_BYTES = 128
"""Size of the header, which has space for any number of rows, so that rows can be appended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What a row is the embedding of.

    Attributes:
        file: the path, as on the command line; None of a text.
        page: the number of the page, from 1 on; None of other files.
        text: the text of the command line.
        instruction: the instruction that was given.
    """

    file: str | None = None
    page: int | None = None
    text: str | None = None
    instruction: str | None = None

    def __str__(self) -> str:
        if self.file is None:
            return repr(self.text)
        return f"{self.file}, page {self.page}" if self.page else self.file


@dataclass(frozen=True, kw_only=True)
class Content:
    """The content of a file.

    Attributes:
        path: the file.
        kind: what it is; `file` is a document.
        data: its bytes.
        digest: the SHA-256 of the bytes.
    """

    path: Path
    kind: Kind | Literal["text"]
    data: bytes
    digest: str

    @classmethod
    def read(cls, path: Path) -> Content:
        """Raise MediaUnreachable if the file cannot be read."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise MediaUnreachable(f"{path} cannot be read: {error.strerror}. Check the path.") from error
        return cls(path=path, kind=media_kind(str(path)) or "text", data=data, digest=hashlib.sha256(data).hexdigest())

    def inputs(self, page: int | None = None) -> dict[str, Any]:
        """Return the fields of a request for its embedding, or for that of one page.

        Raises:
            MediaUndecodable: it is empty, or none of the supported formats.
        """
        if not self.data:
            raise MediaUndecodable("The file is empty. Save it again, or leave it out.")
        if self.kind == "text":
            try:
                return {"input": self.data.decode()}
            except UnicodeDecodeError:
                raise MediaUndecodable(
                    "This is neither text in UTF-8, nor does its suffix name an image, a video or a PDF. Convert it."
                ) from None
        part = self._part
        if page:
            part = {**part, "file": {**part["file"], "pages": str(page), "render": "image"}}
        return {"messages": [{"role": "user", "content": [part]}]}

    @cached_property
    def _part(self) -> Part:
        assert self.kind != "text", "it has no part"
        return data_part(self.kind, self.path, self.data)


class VectorsFile(LineFile):
    """The rows so far: a line for each of them, and the vectors, float32 [rows, dimensions], in NumPy's format.

    After an interruption, rows whose line is complete are kept.

    Args:
        path: the file of the vectors. That of the lines has the suffix .jsonl.

    Raises:
        ConfigError: as `LineFile`, or one of the files is not this command's, or they do not belong together.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix != VECTORS_SUFFIX:
            raise ConfigError(f"`--output` is {path}, but must end with {VECTORS_SUFFIX}.", param="output")
        self.vectors_path = path
        self._rows: set[Row] = set()
        self._digests: dict[str, str] = {}
        self._pages: dict[str, int] = {}
        self._model = ""
        self._dimensions = 0
        self._created = [each for each in (path, path.with_suffix(ROWS_SUFFIX)) if not each.exists()]
        super().__init__(path.with_suffix(ROWS_SUFFIX), prefix=LINE_PREFIX, read=self._read)
        try:
            self._open_vectors()
        except BaseException:
            super().close()
            self._delete_created()
            raise

    def __contains__(self, row: Row) -> bool:
        return row in self._rows

    def num_pages(self, file: str) -> int:
        """Return the number of pages of a document; 0 if no row says it."""
        return self._pages.get(file, 0)

    def has_other_version(self, file: str, digest: str) -> bool:
        """Return whether there are rows of a file of this name with other content."""
        return self._digests.get(file, digest) != digest

    def check_model(self, model: str) -> None:
        """Raise ConfigError if there are rows of another model."""
        if self._rows and self._model != model:
            raise ConfigError(
                f"{self.vectors_path} has vectors of {self._model!r}, not of {model!r}. Choose another `--output`.",
                param="output",
            )

    def check_dimensions(self, dimensions: int) -> None:
        """Raise ConfigError if there are vectors with another number of dimensions."""
        if self._dimensions not in {0, dimensions}:
            raise ConfigError(
                f"{self.vectors_path} has vectors with {self._dimensions} dimensions, not with {dimensions}. Choose"
                " another `--output`.",
                param="output",
            )

    def add(self, row: Row, digest: str | None, result: PoolingResult, *, pages: int | None = None) -> None:
        """Append the embedding of a row.

        Args:
            row: the row.
            digest: that of the file's content; None of a text.
            result: the embedding.
            pages: the number of pages of the document; None of others.

        Raises:
            ConfigError: the file cannot be written, or has rows of another model or with another number of dimensions.
        """
        self.check_model(result.model)
        self.check_dimensions(result.values.shape[1])
        self._dimensions = result.values.shape[1]
        vector = result.values[0].astype("<f4").tobytes()
        number = len(self._rows)
        if not number:
            self._write(self._header(), 0)
        line = {
            "row": number,
            **{name: value for name, value in asdict(row).items() if value is not None},
            **({"pages": pages} if pages else {}),
            **({"digest": digest} if digest else {}),
            "model": result.model,
        }
        self._write(vector, HEADER_BYTES + number * len(vector))
        self.append(line)
        self._store(line)
        self._write(self._header(), 0)

    def close(self) -> None:
        """Close both files, and delete those that this object created if they have no row."""
        os.close(self._vectors)
        if not self._rows:
            self._delete_created()
        super().close()

    def _delete_created(self) -> None:
        for path in self._created:
            path.unlink(missing_ok=True)

    def _open_vectors(self) -> None:
        try:
            self._vectors = os.open(self.vectors_path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise write_error(self.vectors_path, error) from error
        if os.fstat(self._vectors).st_size or self._rows:
            shape = _shape(self.vectors_path)
            surplus = 0 if self.path in self._created else 1  # an interruption leaves one row without its line
            if shape is None or not -1 <= shape[0] - len(self._rows) <= surplus:
                os.close(self._vectors)
                raise ConfigError(
                    f"{self.vectors_path} does not have the rows of {self.path}. Move both away, or choose another"
                    " `--output`.",
                    param="output",
                )
            self._dimensions = shape[1]
            if self._rows and shape[0] != len(self._rows):  # an interruption came before the header was written
                self._write(self._header(), 0)

    def _header(self) -> bytes:
        """Return the header of version 1.0 of the format: the number of rows changes, and its size does not."""
        shape = (len(self._rows), self._dimensions)
        text = repr({"descr": "<f4", "fortran_order": False, "shape": shape}).encode()
        text = text.ljust(HEADER_BYTES - len(_MAGIC) - 3) + b"\n"
        return _MAGIC + struct.pack("<H", len(text)) + text

    def _write(self, data: bytes, offset: int) -> None:
        try:
            while data:
                count = os.pwrite(self._vectors, data, offset)
                offset += count
                data = data[count:]
        except OSError as error:
            raise write_error(self.vectors_path, error) from error

    def _store(self, line: dict[str, Any]) -> None:
        row = Row(**{each.name: line.get(each.name) for each in fields(Row)})
        if line["row"] != len(self._rows) or row in self._rows:
            raise ValueError(line)
        self._model = line["model"]
        self._rows.add(row)
        if row.file is not None:
            self._digests[row.file] = line["digest"]
            if "pages" in line:
                self._pages[row.file] = line["pages"]

    def _read(self, line: bytes, location: str) -> None:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            self._store(json.loads(line))
            return
        raise ConfigError(f"{location} is not the next row. Move the file away, or choose another `--output`.")


def _shape(path: Path) -> tuple[int, int] | None:
    try:
        matrix = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    is_ours = isinstance(matrix, np.memmap) and matrix.ndim == 2 and matrix.dtype == "<f4"
    return (matrix.shape[0], matrix.shape[1]) if is_ours and matrix.offset == HEADER_BYTES else None
