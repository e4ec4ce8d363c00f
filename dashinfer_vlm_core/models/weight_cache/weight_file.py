"""The file of converted weights: magic number, digest and length of the header, header (JSON), tensors.

The tensors are not covered by the digest: reading them would take longer than what the file saves. The file has to
belong to the user of the process or to root instead, and others may not write to it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...config.folders import access_problem

MAGIC = b"dvlm-w01"
DIGEST_BYTES = 32
LENGTH_BYTES = 8
PREFIX_BYTES = len(MAGIC) + DIGEST_BYTES + LENGTH_BYTES
MAX_HEADER_BYTES = 64 << 20
ALIGNMENT = 64
"""Tensors begin at cache lines."""

WRITE_BYTES = 16 << 20
"""How much is written between two checks, and between two waits for the disk."""

TABLE = "table"
"""The name of the only tensor of an embedding table."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.uint8)
}

Layers = Mapping[str, Mapping[str, Tensor]]
"""The tensors of each layer."""


class InvalidFileError(Exception):
    """A file is not usable; the message says why."""


class WeightFile(NamedTuple):
    """An opened file.

    Attributes:
        memory: a private mapping of the file, which the tensors keep alive.
        layers: the tensors of each layer, as views of the mapping.
        matrices: the offset from which on steps read whole tensors; embedding tables are before it.
    """

    memory: mmap.mmap
    layers: Layers
    matrices: int


class _Place(NamedTuple):
    offset: int
    tensor: Tensor


def open_file(path: Path, key: str) -> WeightFile:
    """Map a file into memory and check its owner, mode, size and header.

    Raises:
        OSError: it cannot be read, or it is a symbolic link.
        InvalidFileError: it must not be used.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        check_private(status)
        header = _read_header(descriptor, status.st_size)
        if header["key"] != key or header["size"] != status.st_size:
            raise InvalidFileError("it belongs to other weights, or is incomplete")
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        with contextlib.suppress(OSError):  # a folder that was prepared may be read-only
            os.utime(descriptor)  # the files that were not used for the longest time are removed first
        # Writable copies of pages: tensors of read-only memory are not supported by torch.
        memory = mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    starts = [offset for layer in header["layers"].values() for name, (_, _, offset) in layer.items() if name != TABLE]
    return WeightFile(memory, _views(memory, header["layers"]), min(starts, default=status.st_size))


def check_private(status: os.stat_result) -> None:
    """Check that a file or folder belongs to this user or to root, and that nobody else may write to it.

    Raises:
        InvalidFileError: it does not.
    """
    if problem := access_problem(status):
        raise InvalidFileError(problem)


def _read_header(descriptor: int, size: int) -> Any:
    prefix = os.pread(descriptor, PREFIX_BYTES, 0)
    length = int.from_bytes(prefix[-LENGTH_BYTES:], "little")
    if len(prefix) < PREFIX_BYTES or not prefix.startswith(MAGIC) or length > min(size, MAX_HEADER_BYTES):
        raise InvalidFileError("it has no header")
    text = os.pread(descriptor, length, PREFIX_BYTES)
    if hashlib.sha256(text).digest() != prefix[len(MAGIC) : -LENGTH_BYTES]:
        raise InvalidFileError("its header is damaged")
    return json.loads(text)


def _views(memory: mmap.mmap, layers: Mapping[str, Mapping[str, Sequence[Any]]]) -> Layers:
    return {
        layer: {name: _view(memory, *described) for name, described in tensors.items()}
        for layer, tensors in layers.items()
    }


def _view(memory: mmap.mmap, dtype: str, shape: Sequence[int], offset: int) -> Tensor:
    count = 1
    for length in shape:
        count *= length
    if not count:
        return torch.empty(*shape, dtype=DTYPES[dtype])
    return torch.frombuffer(memory, dtype=DTYPES[dtype], count=count, offset=offset).view(*shape)


def file_size(layers: Layers) -> int:
    """Return about how many bytes a file takes."""
    return sum(tensor.nbytes + ALIGNMENT for tensors in layers.values() for tensor in tensors.values())


def write_file(descriptor: int, key: str, layers: Layers, check: Callable[[], None]) -> None:
    """Write converted weights to an empty file, and to the disk.

    Args:
        descriptor: the file.
        key: its key.
        layers: the layers.
        check: is called between parts, and may raise an error.

    Raises:
        OSError: the disk is full, or cannot be written to.
    """
    header, places = _plan(key, layers)
    _reserve(descriptor, json.loads(header)["size"])
    digest = hashlib.sha256(header).digest()
    prefix = MAGIC + digest + len(header).to_bytes(LENGTH_BYTES, "little")
    unsynced = _write(descriptor, memoryview(prefix + header), 0)
    for offset, part in _parts(places):
        check()
        unsynced += _write(descriptor, part, offset)
        if unsynced >= WRITE_BYTES:
            os.fsync(descriptor)  # one at the end would take long, and could not be canceled
            unsynced = 0
    os.fsync(descriptor)


def _reserve(descriptor: int, size: int) -> None:
    """Set the size of a file; fail now if the disk is full."""
    os.ftruncate(descriptor, size)
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # the file system does not support it
                raise


def _plan(key: str, layers: Layers) -> tuple[bytes, list[_Place]]:
    """Return the header, and where each tensor is written: after the longest header, whose offsets have all digits."""
    header = _header(key, layers, first=1 << 50)[0]
    first = -(-(PREFIX_BYTES + len(header)) // mmap.PAGESIZE) * mmap.PAGESIZE
    return _header(key, layers, first=first)


def _header(key: str, layers: Layers, *, first: int) -> tuple[bytes, list[_Place]]:
    places: list[_Place] = []
    described: dict[str, dict[str, tuple[str, list[int], int]]] = {}
    offset = first
    for layer, tensors in sorted(layers.items(), key=lambda item: TABLE not in item[1]):
        described[layer] = {}
        for name, tensor in tensors.items():
            described[layer][name] = (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset)
            places.append(_Place(offset, tensor))
            offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return json.dumps({"key": key, "size": offset, "layers": described}).encode(), places


def _parts(places: Sequence[_Place]) -> Iterator[tuple[int, memoryview]]:
    for offset, tensor in places:
        if not tensor.nbytes:
            continue
        content = tensor.flatten().view(torch.uint8).numpy().data
        for start in range(0, len(content), WRITE_BYTES):
            yield offset + start, content[start : start + WRITE_BYTES]


def _write(descriptor: int, content: memoryview, offset: int) -> int:
    written = 0
    while written < len(content):
        written += os.pwrite(descriptor, content[written:], offset + written)
    return written
