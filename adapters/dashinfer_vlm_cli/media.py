"""Convert paths, URLs and the clipboard to content parts."""

from __future__ import annotations

import base64
import contextlib
import io
import mimetypes
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import unquote, urlsplit

from dashinfer_vlm_core.config import EngineConfig, Limits
from dashinfer_vlm_core.config.folders import expand_user
from dashinfer_vlm_core.errors import MediaUndecodable, MediaUnreachable, MissingDependency, RequestError
from dashinfer_vlm_core.plugins import load_plugins

Part: TypeAlias = "dict[str, Any]"
Kind = Literal["image", "video", "file"]

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".ts")
_SUFFIXES: Mapping[Kind, tuple[str, ...]] = {"image": IMAGE_SUFFIXES, "video": VIDEO_SUFFIXES, "file": (".pdf",)}
_MEDIA_TYPES: Mapping[Kind, str] = {"image": "image/png", "video": "video/mp4", "file": "application/pdf"}
"""Media types of files whose names do not show them."""

# Terminals insert the path of a dropped file quoted, with escaped spaces, or unchanged.
_WORD = re.compile(r"""'[^']*'|"[^"]*"|(?:\\.|\S)+""")


def media_part(kind: Kind, source: str) -> Part:
    """Return a content part for a path or a URL. A file is embedded as a data URL; a URL is passed on to the engine.

    Raises:
        MediaUnreachable: the file does not exist, or cannot be read.
        RequestError: the file cannot be decoded; with the engine's message.
    """
    url = source if _is_url(source) else _file_url(kind, local_path(source))
    if kind == "file":
        return {"type": "file", "file": {"file_url" if _is_url(source) else "file_data": url}}
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def data_part(kind: Kind, path: Path, data: bytes) -> Part:
    """Return a content part for the content of a file, which is not checked; its path has the media type."""
    url = _file_data_url(kind, path, data)
    if kind == "file":
        return {"type": "file", "file": {"file_data": url}}
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def media_kind(source: str) -> Kind | None:
    """Return what a path or a URL refers to by its suffix; None if that is none of these."""
    path = urlsplit(source).path.lower() if _is_url(source) else source.lower()
    return next((kind for kind, suffixes in _SUFFIXES.items() if path.endswith(suffixes)), None)


def find_media(line: str) -> tuple[str, list[Part]]:
    """Split a line into its text and the images, videos and documents that it contains.

    Recognizes existing files and URLs with the suffix of one of these.
    """
    parts: list[Part] = []

    def extract(match: re.Match[str]) -> str:
        source = _unquote(match[0])
        kind = media_kind(source)
        if kind is None or not (_is_url(source) or local_path(source).is_file()):
            return match[0]
        parts.append(media_part(kind, source))
        return ""

    text = _WORD.sub(extract, line)
    return " ".join(text.split()) if parts else line, parts


def clipboard_part() -> Part:
    """Return the image in the clipboard. Pillow reads it with the desktop's command-line tools.

    Raises:
        MediaUndecodable: the clipboard contains no image.
        MissingDependency: no tool can read the clipboard; the message says what to install.
    """
    from PIL import Image as PILImage
    from PIL import ImageGrab

    try:
        image = ImageGrab.grabclipboard()
    except (NotImplementedError, OSError) as error:
        raise MissingDependency(
            "The clipboard cannot be read. Install wl-clipboard (Wayland) or xclip (X11), or attach a file with /image"
            " PATH."
        ) from error
    if not isinstance(image, PILImage.Image):
        raise MediaUndecodable("There is no image in the clipboard. Copy one, or attach a file with /image PATH.")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return {"type": "image_url", "image_url": {"url": _data_url("image/png", buffer.getvalue())}}


def _is_url(source: str) -> bool:
    return source.lower().startswith(("http://", "https://", "data:"))


def local_path(source: str) -> Path:
    """Return the path of a file as a user writes it. As in shells, `~name` is a file if there is no such user."""
    if source.lower().startswith("file://"):
        source = unquote(urlsplit(source).path)
    return expand_user(source)


def _unquote(word: str) -> str:
    try:
        return "".join(shlex.split(word))
    except ValueError:  # an apostrophe in a sentence
        return word


def _file_url(kind: Kind, path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise MediaUnreachable(f"{path} cannot be read: {error.strerror or error}. Check the path.") from error
    if not data:
        raise MediaUndecodable(f"{path} has 0 bytes. Save it again.")
    try:
        if check := _CHECKS.get(kind):
            check(data)
    except RequestError as error:
        raise type(error)(f"{path}: {error.message}") from error
    return _file_data_url(kind, path, data)


def _file_data_url(kind: Kind, path: Path, data: bytes) -> str:
    return _data_url(mimetypes.guess_type(path.name)[0] or _MEDIA_TYPES[kind], data)


def _check_image(data: bytes) -> None:
    from dashinfer_vlm_core.media.image import decode_image

    decode_image(data, path="", max_pixels=Limits().max_decoded_pixels, background=(0, 0, 0))


def _check_video(data: bytes) -> None:
    """Decode the first frame, if a library for videos is installed: a server may have one."""
    from dashinfer_vlm_core.media.video import select_readers, undecodable_error

    readers = select_readers(load_plugins().video_readers, EngineConfig())
    for reader in readers:
        with contextlib.suppress(MediaUndecodable):
            if any(True for _ in reader.open(data).frames([0], lambda: None)):
                return
    if readers:
        raise undecodable_error()


_CHECKS: Mapping[Kind, Callable[[bytes], None]] = {"image": _check_image, "video": _check_video}
"""Documents are decoded by the engine only, in a process that may crash."""


def _data_url(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
