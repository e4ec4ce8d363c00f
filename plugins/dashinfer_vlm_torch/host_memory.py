"""The memory of the machine, which limits the default size of the KV cache on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from dashinfer_vlm_core.config import MIB

MIN_KV_MIB = 256
"""The default size is not less, even if the weights need all memory."""


def memory_limit(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that this process may use, in bytes: that of the machine, or less in a container.

    Args:
        groups: the file that lists the control groups of this process.
        root: where control groups (version 2) are mounted.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_group_limits(groups, root)])


def _group_limits(groups: Path, root: Path) -> Iterator[int]:
    try:
        path = next((line[3:] for line in groups.read_text().splitlines() if line.startswith("0::")), None)
    except OSError:
        return
    if path is None:
        return
    folder = root / path.strip("/")
    for group in (folder, *folder.parents):
        try:
            limit = (group / "memory.max").read_text().strip()
        except OSError:  # the root of the control groups has no limit
            continue
        if limit.isdigit():
            yield int(limit)


def default_kv_mib(default: int, *, memory: int, weights: int) -> int:
    """Return the default size of the KV cache in MiB: at most half of the memory that the weights leave.

    Args:
        default: the size without this limit, in MiB.
        memory: see `memory_limit`.
        weights: size of the weights in bytes.
    """
    return min(default, max(MIN_KV_MIB, (memory - weights) // 2 // MIB))
