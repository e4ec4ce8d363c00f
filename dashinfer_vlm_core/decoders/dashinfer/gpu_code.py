"""Deallocates the GPU code of DashInfer's extension: 755 of its 856 MB, which an environment for the CPU never reads.

The file keeps its length and every offset; only the blocks of the section `.nv_fatbin` go back to the file system, so
that they read as zeros. Nothing but a CUDA driver reads that section.
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
"""The file's header: offset of the table of sections, size and number of its entries, index of the one with names."""
_ENTRY = struct.Struct("<I20xQQ")
"""An entry of that table: offset of the section's name among the names, offset and size of the section."""

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h


def remove_gpu_code(library: Path) -> int:
    """Deallocate the GPU code of `library`; the bytes of disk that this freed.

    Returns 0 and logs the reason where that is impossible: on a file system that cannot do it, and for a file that has
    other names (hard links), which belong to somebody else.
    """
    try:
        with library.open("r+b") as file:
            before = os.fstat(file.fileno())
            if before.st_nlink > 1:
                logger.info("The GPU code in %s is kept: the file has other names.", library)
                return 0
            offset, size = find_section(file, SECTION)
            _punch_hole(file.fileno(), offset, size)
            os.fsync(file.fileno())  # some file systems count blocks only then
            return max(0, 512 * (before.st_blocks - os.fstat(file.fileno()).st_blocks))
    except (OSError, ValueError, IndexError, struct.error) as error:
        logger.info("The GPU code in %s is kept: %s", library, error)
        return 0


def find_section(file: BinaryIO, name: bytes) -> tuple[int, int]:
    """Offset and size of a section, in bytes.

    Raises:
        ValueError: it is not a little-endian ELF file of 64 bits, or has no section of that name.
    """
    header = file.read(_TABLE.size)
    if not header.startswith(_ELF64):
        raise ValueError("it is not an ELF file of 64 bits")
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
    """Deallocate `size` bytes from `offset` on; blocks that lie only partly inside are zeroed there.

    Raises:
        OSError: the file system cannot do it.
    """
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate64
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, offset, size):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
