"""Convert LiteLLM's `file` parts, which can contain images and videos, to `image_url` and `video_url` parts."""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from dashinfer_vlm_core.errors import UnsupportedParameter

Json: TypeAlias = dict[str, Any]

_DATA_TYPE = re.compile(r"data:([\w.+-]+/[\w.+-]+)", re.IGNORECASE)
_URL = re.compile(r"(data|https?):", re.IGNORECASE)
_SOURCE_KEYS = frozenset({"file_data", "file_id", "filename", "format"})


def convert_files(messages: Any) -> Any:
    """Replace the `file` parts of messages; everything else is unchanged, and validated by the engine.

    Raises:
        UnsupportedParameter: a file is not an image or video, is referenced by an ID of OpenAI's Files API, or has an
            option that its kind does not have.
    """
    if not isinstance(messages, list):
        return messages
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, path: str) -> Any:
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return message
    parts = [_part(part, f"{path}.content[{index}]") for index, part in enumerate(message["content"])]
    return {**message, "content": parts}


def _part(part: Any, path: str) -> Any:
    if not isinstance(part, Mapping) or part.get("type") != "file" or not isinstance(part.get("file"), Mapping):
        return part
    file = part["file"]
    kind, url = _source(file, path)
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url, **_options(file, kind, path)}}


def _source(file: Mapping[str, Any], path: str) -> tuple[str, str]:
    """Return the kind of a file, `image` or `video`, and its URL.

    LiteLLM defines `file_data`, a data: URL or base64, `file_id`, which may be a URL, and `format`, a media type.
    """
    source = str(file.get("file_data") or file.get("file_id") or "")
    media_type = str(file.get("format") or _declared_type(source) or _guess(file, source))
    kind = media_type.partition("/")[0].lower()
    is_url = _URL.match(source) is not None
    if kind not in ("image", "video") or not (is_url or file.get("file_data")):
        raise UnsupportedParameter(
            f"`{path}.file` must be an image or a video: `file_data` or a URL as `file_id`, with `format`, such as"
            " video/mp4.",
            param=f"{path}.file",
        )
    return kind, source if is_url else f"data:{media_type};base64,{source}"


def _options(file: Mapping[str, Any], kind: str, path: str) -> Json:
    """Return `detail` of an image, and `fps` of LiteLLM's `video_metadata`."""
    given = {key: value for key, value in file.items() if key not in _SOURCE_KEYS and value is not None}
    metadata = given.pop("video_metadata", {})
    given |= metadata if isinstance(metadata, Mapping) else {"video_metadata": metadata}
    supported = "detail" if kind == "image" else "fps"
    for name in given:
        if name != supported:
            raise UnsupportedParameter(
                f"`{path}.file` has the option `{name}`, which is not available for a file of kind {kind}. Remove it.",
                param=f"{path}.file",
            )
    return given


def _declared_type(source: str) -> str:
    """Return the media type of a data: URL."""
    found = _DATA_TYPE.match(source)
    return found[1] if found else ""


def _guess(file: Mapping[str, Any], source: str) -> str:
    """Guess the media type by the name of a file or of its URL."""
    name = str(file.get("filename") or ("" if file.get("file_data") else source))
    return mimetypes.guess_type(name)[0] or ""
