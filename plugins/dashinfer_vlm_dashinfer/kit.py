"""The kit: DashInfer's environment for one GPU with a CPython of its own, in pieces for a machine without a network.

`scripts/make-dashinfer-kit` makes it. The pieces are those of one compressed archive, whose only folder is `env`.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import zlib
from pathlib import Path

from dashinfer_vlm_core.errors import SetupError

from .environment import CHUNK_BYTES, sha256

PIECE = "dashinfer-kit.{:02}"
SUMS = "SHA256SUMS"


def unpack_kit(kit: Path, folder: Path) -> None:
    """Check the pieces of a kit, and unpack them into `folder`, in place of its folder `env`.

    Raises:
        SetupError: a piece is missing or damaged, or the disk is full.
    """
    pieces = check_pieces(kit)
    shutil.rmtree(folder / "env", ignore_errors=True)
    try:
        with (
            subprocess.Popen(["cat", *pieces], stdout=subprocess.PIPE) as joined,  # noqa: S603, S607 - the operator's files
            tarfile.open(fileobj=joined.stdout, mode="r|gz", bufsize=CHUNK_BYTES) as archive,
        ):
            archive.extractall(folder, filter="data")
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise SetupError(f"The kit in {kit} cannot be unpacked into {folder}: {error}.") from error


def check_pieces(kit: Path) -> list[Path]:
    """Return the pieces of a kit, in order, after a comparison with their checksums.

    Raises:
        SetupError: a piece is missing or damaged.
    """
    try:
        lines = (kit / SUMS).read_text(encoding="ascii").splitlines()
        expected = {kit / name: digest for digest, name in (line.split() for line in lines)}
    except (OSError, ValueError) as error:
        message = f"{kit} is not a kit: {SUMS} cannot be read. Copy the folder that `scripts/make-dashinfer-kit` made."
        raise SetupError(message) from error
    for piece, digest in expected.items():
        if not piece.is_file() or sha256(piece) != digest:
            raise SetupError(f"{piece} is missing or damaged. Copy it again.")
    return list(expected)
