"""Convert images and videos of callers to the content parts of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import InvalidParameter
from ..media.types import Kind
from ..protocol import EncodedEmbeddings, MediaPart
from ..protocol.messages import Part
from ..protocol.validation_errors import explain, invalid, show, unsupported

OPTIONS: Mapping[Kind, Mapping[str, str]] = {
    "image": {"min_pixels": "min_pixels", "max_pixels": "max_pixels"},
    "video": {
        "min_pixels": "min_pixels",
        "max_pixels": "max_pixels",
        "total_pixels": "total_pixels",
        "fps": "fps",
        "sample_fps": "fps",
        "num_frames": "num_frames",
        "nframes": "num_frames",
    },
}
"""Options of a part, and their names in a request; `nframes` and, for lists of frames, `sample_fps` are the names in
qwen-vl-utils."""

_OBJECT_URL = "memory:"


def to_json_part(kind: Kind, value: object, options: Mapping[str, Any], uuid: str | None, path: str) -> dict[str, Any]:
    """Return a content part in its JSON form. Its URL is a placeholder if `is_object(value)`.

    Args:
        kind: the kind of the part.
        value: a URL or path, for a video also a list of them, an object for `media.python_objects`, or None.
        options: options by their names in `OPTIONS`.
        uuid: the caller's name for it.
        path: the part's path in the request, for errors.

    Raises:
        InvalidParameter, UnsupportedParameter: an option is unknown, or cannot be combined with the value.
    """
    for name in options:
        if name not in OPTIONS[kind]:
            raise invalid(path, f"has no option {show(name)}. Its options are {', '.join(OPTIONS[kind])}.")
        if isinstance(value, (Mapping, EncodedEmbeddings)):
            raise unsupported(f"{path}.{name}", "is not available for embeddings, whose size is fixed. Remove it.")
    source = {OPTIONS[kind][name]: option for name, option in options.items()}
    if value is not None:
        source["url"] = _OBJECT_URL if is_object(value) else _url(value)
    return {"type": f"{kind}_url", f"{kind}_url": source or None, "uuid": uuid}


def media_part(kind: Kind, value: object, uuid: str | None, path: str) -> MediaPart:
    """Return a content part for a rendered prompt; `value` can also be qwen-vl-utils' `{"image": ..., options}`.

    Raises:
        InvalidParameter, UnsupportedParameter: as `to_json_part`, or an option is out of range.
    """
    options: Mapping[str, Any] = {}
    if isinstance(value, Mapping) and kind in value:
        options = {name: option for name, option in value.items() if name not in {kind, "type"}}
        value = value[kind]
    try:
        part = Part.model_validate(to_json_part(kind, value, options, uuid, path))
    except ValidationError as error:
        invalid = explain(error)
        raise InvalidParameter(f"In `{path}`: {invalid.message}", param=f"{path}.{invalid.param}") from None
    part.check("user", path)
    media = part.media(path)
    assert media is not None
    return replace(media, url=None, content=value) if is_object(value) else replace(media, url_field="")


def is_object(value: object) -> bool:
    """Return whether this is a Python object, rather than a URL, a path, or None for cached media."""
    return not (
        value is None or _is_source(value) or (isinstance(value, (list, tuple)) and all(map(_is_source, value)))
    )


def _is_source(value: object) -> bool:
    return isinstance(value, (str, Path))


def _url(value: Any) -> str | list[str]:
    return str(value) if _is_source(value) else [str(frame) for frame in value]
