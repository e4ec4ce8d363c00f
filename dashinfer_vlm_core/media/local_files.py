"""Local files of the folder that requests may refer to."""

from __future__ import annotations

import os
import re
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..errors import MediaRefused, MediaTooLarge, MediaUnreachable

MAX_PATH_CHARS = 64 * 1024
"""Maximum length of a file: URL or path. Linux allows paths of 4,096 bytes, and 255 in a name."""

_MISSING = "The file does not exist or cannot be read. Check its name."
# How PNG, JPEG, GIF, WebP, TIFF and MP4 files start in base64, or else many characters. The path of an image has a dot.
_BARE_BASE64 = re.compile(r"iVBORw0KGgo|[/_]9j[/_]|R0lGOD|UklGR|SUkqA|TU0AK|AAAA..Z0eX|[A-Za-z0-9+/_-]{256}")

# O_NONBLOCK does not wait for a pipe; O_NOFOLLOW rejects a link that replaced the file after the check.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER_FLAGS = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_PATH if sys.platform == "linux" else os.O_RDONLY)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSource:
    """A file in the allowed folder.

    Attributes:
        folder: the allowed folder.
        name: the file's path in it, without symbolic links.
        limit: its maximum size in bytes.
        path: the path of the part in the request.
    """

    folder: Path
    name: Path
    limit: int
    path: str = field(compare=False)


def find_file(text: str, folder: Path | None, *, limit: int, path: str) -> LocalSource:
    """Find the file of a file: URL or a path in the allowed folder, without opening it.

    Relative paths refer to this folder, or to the current one if all folders are allowed.

    Raises:
        MediaRefused: local files are not allowed, the path is outside the folder, or it is not a path but base64.
        MediaUnreachable: the path is too long.
    """
    if _BARE_BASE64.match("".join(text[:512].split())) and "." not in text:  # many encoders write lines
        raise MediaRefused(
            f"`{path}` is base64 without the prefix of a data: URL. Put `data:image/png;base64,` in front of it, or"
            " `data:video/mp4;base64,` for a video.",
            param=path,
        )
    if folder is not None:
        if len(text) > MAX_PATH_CHARS:
            raise MediaUnreachable(_MISSING, param=path)
        try:
            root = folder.resolve()
            base = root if root != root.parent else Path.cwd()
            file = (base / _path_from_url(text)).resolve()
            return LocalSource(folder=root, name=file.relative_to(root), limit=limit, path=path)
        except (OSError, ValueError, RuntimeError):  # invalid names, symlink loops, and other folders
            pass
    raise MediaRefused(
        "Local files are not allowed here. Send a data:, http: or https: URL, or start the engine with"
        " --allowed-local-media-path (in Python, `allowed_local_media_path`), the folder of the files.",
        param=path,
    )


def read(source: LocalSource) -> bytes:
    """Read a local file.

    Raises:
        MediaUnreachable: the path is not a readable regular file.
        MediaTooLarge: the file exceeds the limit.
    """
    try:
        handle = _open_beneath(source.folder, source.name)
        with open(handle, "rb") as file:  # noqa: PTH123  a descriptor has no Path
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError("not a regular file")
            data = file.read(source.limit + 1)
    except OSError as error:
        raise MediaUnreachable(_MISSING, param=source.path, file=source.folder / source.name) from error
    if len(data) > source.limit:
        raise MediaTooLarge(f"The media exceeds {source.limit} bytes. Send a smaller file.", param=source.path)
    return data


def _open_beneath(folder: Path, name: Path) -> int:
    # No link is followed: the name has none, unless somebody has replaced a part of it after the check.
    opened = os.open(folder, _FOLDER_FLAGS)
    try:
        for part in name.parts[:-1]:
            parent = opened
            opened = os.open(part, _FOLDER_FLAGS, dir_fd=parent)
            os.close(parent)
        return os.open(name.name, _FLAGS, dir_fd=opened)
    finally:
        os.close(opened)


def _path_from_url(text: str) -> str:
    if text[:5].lower() != "file:":
        return text
    url = urlsplit(text)
    if url.netloc not in ("", "localhost") or url.query or url.fragment:
        raise ValueError("a file: URL must be a path on this machine, without a host, query or fragment")
    return unquote(url.path)
