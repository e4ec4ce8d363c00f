"""What the files of a checkpoint, and the code that converts them, are recognized by, without reading gigabytes."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header."""

MAX_HEADER_BYTES = 100 << 20


def checkpoint_key(folder: Path, parts: Iterable[str]) -> str:
    """Return a digest of `parts` and of the identity of a checkpoint's files.

    Of each file with weights or settings: inode, size, and the times of the last change of its content and of its
    inode, which no program can set back; of files with weights also the header. What is not noticed is a change below
    the file system. The number of the device is left out: those of network and overlay file systems change with each
    mount.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256(json.dumps(list(parts)).encode())
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")]):
        status = file.stat()
        identity = status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        digest.update(json.dumps([file.name, *identity]).encode())
        if file.suffix == ".safetensors":
            digest.update(_header(file))
    return digest.hexdigest()


@functools.cache
def source_digest(folder: Path) -> str:
    """Return a digest of a Python file, or of those below a folder, as they were when it was first computed."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")) or [folder]:
        digest.update(json.dumps([str(file.relative_to(folder)), file.read_text(encoding="utf-8")]).encode())
    return digest.hexdigest()


def _header(file: Path) -> bytes:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
        return opened.read(min(length, MAX_HEADER_BYTES))
