"""What callers write for a picture or video -> the part that a request would have for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import InvalidParameter, UnsupportedParameter
from ..media.types import Kind
from ..protocol import EncodedEmbeddings, MediaPart
from ..protocol.messages import Part
from ..protocol.validation_errors import explain, show

OPTIONS: Mapping[Kind, Mapping[str, str]] = {
    "image": {"min_pixels": "min_pixels", "max_pixels": "max_pixels"},
    "video": {
        "min_pixels": "min_pixels",
        "max_pixels": "max_pixels",
        "total_pixels": "total_pixels",
        "fps": "fps",
        "num_frames": "num_frames",
        "nframes": "num_frames",
    },
}
"""Options of a part, and what a request calls them: `nframes` is what qwen-vl-utils says."""

_HERE = "memory:"


def wire_part(kind: Kind, value: object, options: Mapping[str, Any], uuid: str | None, where: str) -> dict[str, Any]:
    """A content part as in JSON, whose URL says nothing where `is_object(value)`.

    Args:
        kind: of the part.
        value: a URL or path, for a video also a list of them, an object for `media.memory`, or None.
        options: beside it, by the names in `OPTIONS`.
        uuid: the caller's name for it.
        where: names it in errors.

    Raises:
        InvalidParameter, UnsupportedParameter: an option is not known, or does not go with the value.
    """
    for name in options:
        if name not in OPTIONS[kind]:
            raise InvalidParameter(
                f"`{where}` has no option {show(name)}: it may have {', '.join(OPTIONS[kind])}.", param=where
            )
        if isinstance(value, (Mapping, EncodedEmbeddings)):
            raise UnsupportedParameter(
                f"`{where}` is embeddings, whose size is settled: leave out `{name}`.", param=f"{where}.{name}"
            )
    source = {OPTIONS[kind][name]: option for name, option in options.items()}
    if value is not None:
        source["url"] = _HERE if is_object(value) else _url(value)
    return {"type": f"{kind}_url", f"{kind}_url": source or None, "uuid": uuid}


def media_part(kind: Kind, value: object, uuid: str | None, where: str) -> MediaPart:
    """The same for a prompt that is rendered already; `value` may also be qwen-vl-utils' `{"image": ..., options}`.

    Raises:
        InvalidParameter, UnsupportedParameter: as `wire_part`, or an option out of its range.
    """
    options: Mapping[str, Any] = {}
    if isinstance(value, Mapping) and kind in value:
        options = {name: option for name, option in value.items() if name not in {kind, "type"}}
        value = value[kind]
    try:
        part = Part.model_validate(wire_part(kind, value, options, uuid, where))
    except ValidationError as error:
        fault = explain(error)
        raise InvalidParameter(f"In `{where}`: {fault.message}", param=f"{where}.{fault.param}") from None
    part.check("user", where)
    found = part.media(where)
    assert found is not None
    return replace(found, url=None, content=value) if is_object(value) else found


def is_object(value: object) -> bool:
    """Whether it is there already, rather than to be fetched or recalled."""
    return not (
        value is None or _is_source(value) or (isinstance(value, (list, tuple)) and all(map(_is_source, value)))
    )


def _is_source(value: object) -> bool:
    return isinstance(value, (str, Path))


def _url(value: Any) -> str | list[str]:
    return str(value) if _is_source(value) else [str(frame) for frame in value]
