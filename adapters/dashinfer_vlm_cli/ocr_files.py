"""The files of `ocr`: what it reads, the pages so far as lines of JSON, and the Markdown of each file."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import mimetypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dashinfer_vlm_core.errors import ConfigError, MediaUnreachable

from .line_file import LineFile, write_error

if TYPE_CHECKING:
    from dashinfer_vlm_core.response.ocr import OcrPage

PAGES_FILE = "pages.jsonl"
LINE_PREFIX = b'{"file": "'


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A file to convert.

    Attributes:
        path: the file.
        output: the Markdown file.
    """

    path: Path
    output: Path

    def read(self) -> bytes:
        """Raise MediaUnreachable if the file cannot be read."""
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise MediaUnreachable(f"{self.path} cannot be read: {error.strerror}. Check the path.") from error

    def write(self, text: str) -> None:
        """Write the Markdown file. Raises ConfigError if that is not possible."""
        try:
            self.output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise write_error(self.output, error) from error

    def document(self, data: bytes) -> dict[str, Any]:
        """Return the content of the file as the document of an OCR request."""
        kind = mimetypes.guess_type(self.path.name)[0] or "application/pdf"
        return {"document_url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}


def find_sources(files: Sequence[Path], folder: Path) -> list[Source]:
    """Return what each file becomes.

    Raises:
        ConfigError: two files would have the same output.
    """
    outputs: dict[Path, Path] = {}
    for path in files:
        output = folder / f"{path.stem}.md"
        if outputs.setdefault(output, path) != path:
            raise ConfigError(
                f"{outputs[output]} and {path} would both become {output}. Convert them into different folders."
            )
    return [Source(path=path, output=output) for output, path in outputs.items()]


class PagesFile(LineFile):
    """The pages that were converted, one per line. Files are identified by a digest of their content.

    Args:
        path: the file; it is created if it does not exist.

    Raises:
        ConfigError: as `LineFile`, or it is another file.
    """

    def __init__(self, path: Path) -> None:
        self._names: set[str] = set()
        self._pages: dict[str, dict[int, dict[str, Any]]] = {}
        self._totals: dict[str, int] = {}
        super().__init__(path, prefix=LINE_PREFIX, read=self._read)

    def check_outputs(self, sources: Sequence[Source]) -> None:
        """Check that the Markdown files that exist are this command's, which may replace them.

        Raises:
            ConfigError: one exists, but no page of a file of its source's name was converted.
        """
        for source in sources:
            if source.path.name not in self._names and os.path.lexists(source.output):
                raise ConfigError(
                    f"{source.output} exists, but {self.path} has no page of {source.path.name}: it would be lost."
                    " Move it away, or choose another folder."
                )

    def add(self, source: Source, digest: str, page: OcrPage, total: int) -> None:
        """Append a page; of two lines about a page, the later one counts."""
        line = {
            "file": source.path.name,
            "digest": digest,
            "total_pages": total,
            **page.model_dump(include={"index", "markdown", "error"}),
        }
        self._store(line)
        self.append(line)

    def add_name(self, source: Source, digest: str) -> None:
        """Append the pages of a file again that were converted from one of another name."""
        if source.path.name not in self._names:
            for page in [*self._pages.get(digest, {}).values()]:
                line = {**page, "file": source.path.name}
                self._store(line)
                self.append(line)

    def total(self, digest: str) -> int | None:
        """Return the number of pages of a file; None if no page was converted yet."""
        return self._totals.get(digest)

    def missing(self, digest: str) -> list[int]:
        """Return the indices of the pages that have no text, or are incomplete."""
        pages = self._pages.get(digest, {})
        return [index for index in range(self._totals.get(digest, 0)) if pages.get(index, {}).get("error", True)]

    def errors(self, digest: str) -> list[tuple[int, str]]:
        """Return the indices of the pages that failed, with the messages."""
        pages = self._pages.get(digest, {})
        return [(index, pages[index]["error"]["message"]) for index in sorted(pages) if pages[index]["error"]]

    def is_complete(self, digest: str) -> bool:
        return self.total(digest) is not None and not self.missing(digest)

    def markdown(self, digest: str) -> str:
        """Return the text of a file, with a comment in place of each page that failed; empty if there is no page."""
        pages = self._pages.get(digest, {})
        return "".join(f"{text}\n\n" for index in sorted(pages) if (text := _to_text(pages[index])))

    def _store(self, line: dict[str, Any]) -> None:
        self._names.add(line["file"])
        self._totals[line["digest"]] = line["total_pages"]
        self._pages.setdefault(line["digest"], {})[line["index"]] = line

    def _read(self, line: bytes, location: str) -> None:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            self._store(json.loads(line))
            return
        raise ConfigError(f"{location} is not a page. Choose another folder, or move the file away.")


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _to_text(page: dict[str, Any]) -> str:
    error = page["error"]
    comment = f"<!-- Page {page['index'] + 1}: {error['message'].replace('--', '- -')} -->" if error else ""
    return "\n\n".join(filter(None, (page["markdown"], comment)))
