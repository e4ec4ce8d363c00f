"""What people name on a command line -> content parts: paths, URLs, and pictures of the clipboard."""

from __future__ import annotations

import base64
import io
import mimetypes
import re
import shlex
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import unquote, urlsplit

from dashinfer_vlm_core.errors import MediaUndecodable, MediaUnreachable, MissingDependency

Part: TypeAlias = "dict[str, Any]"
Kind = Literal["image", "video"]

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
VIDEOS = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".ts")

# As terminals write a file that is dropped on them: quoted, with escaped blanks, or as it is.
_WORD = re.compile(r"""'[^']*'|"[^"]*"|(?:\\.|\S)+""")


def media_part(kind: Kind, source: str) -> Part:
    """A content part for a path or an address; a file comes along whole, an address is left to the engine.

    Raises:
        MediaUnreachable: there is no such file, or it cannot be read.
    """
    url = source if _is_address(source) else _data_url(kind, _path(source))
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def find_media(line: str) -> tuple[str, list[Part]]:
    """A line that was typed -> its text without the pictures and videos that it names, and these.

    Files count that are there, and addresses whose path ends as those of pictures and videos do.
    """
    parts: list[Part] = []

    def take(found: re.Match[str]) -> str:
        source = _unquoted(found[0])
        kind = _kind(source)
        if kind is None or not (_is_address(source) or _path(source).is_file()):
            return found[0]
        parts.append(media_part(kind, source))
        return ""

    text = _WORD.sub(take, line)
    return " ".join(text.split()) if parts else line, parts


def clipboard_part() -> Part:
    """The picture in the clipboard, which Pillow reads by the programs of the desktop.

    Raises:
        MediaUndecodable: there is none.
        MissingDependency: nothing here can read the clipboard; the message says what to install.
    """
    from PIL import Image as PILImage
    from PIL import ImageGrab

    try:
        held = ImageGrab.grabclipboard()
    except (NotImplementedError, OSError) as error:
        raise MissingDependency(
            "The clipboard cannot be read here: install wl-clipboard (Wayland) or xclip (X11), or name a file with"
            " /image PATH."
        ) from error
    if not isinstance(held, PILImage.Image):
        raise MediaUndecodable("There is no picture in the clipboard. Copy one, or name a file with /image PATH.")
    buffer = io.BytesIO()
    held.save(buffer, "PNG")
    return {"type": "image_url", "image_url": {"url": _as_url("image/png", buffer.getvalue())}}


def _kind(source: str) -> Kind | None:
    path = urlsplit(source).path.lower() if _is_address(source) else source.lower()
    if path.endswith(PICTURES):
        return "image"
    return "video" if path.endswith(VIDEOS) else None


def _is_address(source: str) -> bool:
    return source.lower().startswith(("http://", "https://", "data:"))


def _path(source: str) -> Path:
    if source.lower().startswith("file://"):
        source = unquote(urlsplit(source).path)
    return Path(source).expanduser()


def _unquoted(word: str) -> str:
    try:
        return "".join(shlex.split(word))
    except ValueError:  # an apostrophe in the midst of a sentence
        return word


def _data_url(kind: Kind, path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise MediaUnreachable(f"{path} cannot be read: {error.strerror or error}. Check the path.") from error
    media_type = mimetypes.guess_type(path.name)[0] or f"{kind}/{'png' if kind == 'image' else 'mp4'}"
    return _as_url(media_type, data)


def _as_url(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
