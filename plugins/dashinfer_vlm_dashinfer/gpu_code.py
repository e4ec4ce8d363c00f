"""Deallocate the GPU code of DashInfer's extension: 755 of its 856 MB, which a CPU-only environment never reads.

The file keeps its length and all offsets. Only the blocks of the section `.nv_fatbin` are returned to the file system,
so that they read as zeros. Only a CUDA driver reads that section.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
from pathlib import Path
from typing import BinaryIO

logger: logging.Logger = logging.getLogger(__name__)

SECTION = b".nv_fatbin"

_ELF64 = b"\x7fELF\x02\x01"
_TABLE = struct.Struct("<40xQ10xHHH")
"""The file's header: offset of the section header table, size and number of its entries, index of the name section."""
_ENTRY = struct.Struct("<I20xQQ")
"""An entry of that table: offset of the section's name in the name section, offset and size of the section."""

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h


def remove_gpu_code(library: Path) -> int:
    """Deallocate the GPU code of `library`; returns the number of bytes freed on disk.

    Returns 0 and logs the reason if that is impossible: the file system does not support it, or the file has other hard
    links, whose owners may need the code.
    """
    try:
        with library.open("r+b") as file:
            before = os.fstat(file.fileno())
            if before.st_nlink > 1:
                logger.info("The GPU code in %s is kept: the file has other hard links.", library)
                return 0
            offset, size = find_section(file, SECTION)
            _punch_hole(file.fileno(), offset, size)
            os.fsync(file.fileno())  # some file systems update the block count only then
            return max(0, 512 * (before.st_blocks - os.fstat(file.fileno()).st_blocks))
    except (OSError, ValueError, IndexError, struct.error) as error:
        logger.info("The GPU code in %s is kept: %s", library, error)
        return 0


def find_section(file: BinaryIO, name: bytes) -> tuple[int, int]:
    """Find the offset and size of a section, in bytes.

    Raises:
        ValueError: the file is not a little-endian 64-bit ELF file, or has no section of that name.
    """
    header = file.read(_TABLE.size)
    if not header.startswith(_ELF64):
        raise ValueError("it is not a 64-bit ELF file")
    table, entry_size, count, names_index = _TABLE.unpack(header)
    file.seek(table)
    entries = [_ENTRY.unpack_from(file.read(entry_size)) for _ in range(count)]
    _, offset, size = entries[names_index]
    file.seek(offset)
    names = file.read(size)
    for start, offset, size in entries:
        if names[start : names.index(b"\0", start)] == name:
            return offset, size
    raise ValueError(f"it has no section {name.decode()}")


def _punch_hole(descriptor: int, offset: int, size: int) -> None:
    """Deallocate `size` bytes from `offset` on; in partially covered blocks, these bytes are set to zero.

    Raises:
        OSError: the file system does not support it.
    """
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate64
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, offset, size):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
