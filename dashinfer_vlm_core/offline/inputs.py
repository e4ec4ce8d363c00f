"""Convert prompts and conversations of callers, with their images and videos, to fields of `OfflineRequest`."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image as PILImage
from pydantic import ValidationError

from ..errors import InvalidParameter, UnsupportedParameter
from ..media.types import Kind
from ..media.video_objects import has_metadata
from ..protocol import EncodedEmbeddings, MediaPart, OfflineRequest
from ..protocol.fields import NO_AUDIO
from ..protocol.messages import Part
from ..protocol.validation_errors import explain, invalid, show, unsupported

_KINDS: tuple[Kind, ...] = ("image", "video")
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
_OBJECT_PARTS: Mapping[str, Kind] = {"image_pil": "image", "image": "image", "image_embeds": "image", "video": "video"}
OPTIONS: Mapping[Kind, Mapping[str, str]] = {
    "image": {"min_pixels": "min_pixels", "max_pixels": "max_pixels", "pruning_rate": "pruning_rate"},
    "video": {
        "min_pixels": "min_pixels",
        "max_pixels": "max_pixels",
        "total_pixels": "total_pixels",
        "fps": "fps",
        "sample_fps": "fps",
        "num_frames": "num_frames",
        "nframes": "num_frames",
        "align": "align",
        "min_change": "min_change",
        "pruning_rate": "pruning_rate",
    },
}
"""Options of a part, and their names in a request; `nframes` and, for lists of frames, `sample_fps` are the names in
qwen-vl-utils."""

_OBJECT_URL = "memory:"


@dataclass(frozen=True, slots=True)
class MediaDefaults:
    """Options for all media that apply to requests without them.

    Attributes:
        mm_processor_kwargs: the defaults of a request's `mm_processor_kwargs`.
        media_io_kwargs: the `media_io_kwargs` of all requests.

    Raises:
        InvalidParameter: an option is unknown, has an invalid value, or contradicts another one.
    """

    mm_processor_kwargs: Mapping[str, Any]
    media_io_kwargs: Mapping[str, Any]

    def __post_init__(self) -> None:
        OfflineRequest.parse({**self.fields(None), "prompt": "Hello"})

    def fields(self, mm_processor_kwargs: object) -> dict[str, Any]:
        """Return the fields of a request with these options of its own."""
        given = {} if mm_processor_kwargs is None else mm_processor_kwargs
        if isinstance(given, Mapping):
            given = {**self.mm_processor_kwargs, **given}
        return {"mm_processor_kwargs": given, "media_io_kwargs": dict(self.media_io_kwargs)}


def is_single_prompt(prompts: object) -> bool:
    """Return whether this is a single prompt: text, token IDs, or an object."""
    return isinstance(prompts, (str, Mapping)) or _is_ids(prompts)


def is_single_conversation(messages: object) -> bool:
    """Return whether this is a list of messages rather than a list of conversations or prompts."""
    if not isinstance(messages, (list, tuple)) or not messages or not isinstance(messages[0], Mapping):
        return False
    return not {"prompt", "prompt_token_ids"} & messages[0].keys()


def prompt_text(prompt: object) -> str | None:
    """Return the text of a prompt, or None if it is token IDs."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def prompt_fields(prompt: object, defaults: MediaDefaults) -> dict[str, Any]:
    """Return the fields of the request for one rendered prompt.

    Raises:
        InvalidParameter, UnsupportedParameter: the prompt is invalid; `param` is the key, such as
            `multi_modal_data.image[0]`.
    """
    given = prompt if isinstance(prompt, Mapping) else {"prompt_token_ids" if _is_ids(prompt) else "prompt": prompt}
    for name in given:
        if name not in _PROMPT_KEYS:
            raise InvalidParameter(f"A prompt has no key {show(name)}. Its keys are {', '.join(_PROMPT_KEYS)}.")
    return {
        "prompt": _raw_prompt(given),
        "attached": _media_parts(given),
        **defaults.fields(given.get("mm_processor_kwargs")),
    }


def message_fields(messages: object) -> dict[str, Any]:
    """Return the fields of the request for one conversation.

    Raises:
        InvalidParameter, UnsupportedParameter: the conversation is invalid; `param` is the field, such as
            `messages[0].content[1]`.
    """
    contents: dict[str, Any] = {}
    if isinstance(messages, (list, tuple)):
        messages = [_message(message, f"messages[{index}]", contents) for index, message in enumerate(messages)]
    return {"messages": messages, "contents": contents}


def _is_ids(value: object) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(type(item) is int for item in value)


def _raw_prompt(given: Mapping[str, Any]) -> str | tuple[int, ...]:
    text = given.get("prompt")
    ids = given.get("prompt_token_ids")
    if isinstance(text, str) and ids is None:
        return text
    if text is None and ids is not None and _is_ids(ids):
        return tuple(ids)
    raise InvalidParameter(
        "A prompt is text in `prompt`, or a list of token IDs in `prompt_token_ids`. Pass one of them.", param="prompt"
    )


def _media_parts(given: Mapping[str, Any]) -> tuple[MediaPart, ...]:
    data = _by_kind(given, "multi_modal_data")
    uuids = _by_kind(given, "multi_modal_uuids")
    return tuple(part for kind in _KINDS for part in _parts_of_kind(kind, data.get(kind), uuids.get(kind)))


def _by_kind(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = given.get(name) or {}
    if not isinstance(value, Mapping):
        raise invalid(name, "must be an object with `image` and `video`.")
    for kind in value:
        if kind not in _KINDS:
            step = NO_AUDIO if kind == "audio" else "Its keys are image and video."
            raise UnsupportedParameter(f"`{name}` cannot have {show(kind)}. {step}", param=f"{name}.{kind}")
    return value


def _parts_of_kind(kind: Kind, value: object, uuids: object) -> list[MediaPart]:
    names = [uuids] if isinstance(uuids, str) else uuids
    if names is not None and not isinstance(names, (list, tuple)):
        raise invalid(f"multi_modal_uuids.{kind}", "must be a list of strings and None.")
    items: Sequence[object] = [None] * len(names or ()) if value is None else _items(kind, value)
    names = [None] * len(items) if names is None else names
    if len(names) != len(items):
        raise invalid(
            f"multi_modal_uuids.{kind}",
            f"has {len(names)} entries for {len(items)} items of `multi_modal_data.{kind}`. Pass one for each item.",
        )
    return [
        _media_part(kind, item, name, f"multi_modal_data.{kind}[{index}]")
        for index, (item, name) in enumerate(zip(items, names, strict=True))
    ]


def _items(kind: Kind, value: object) -> Sequence[object]:
    """Return the items of a value, which is one item or a list; a list of images under `video` is one video."""
    if not isinstance(value, (list, tuple)) or (kind == "video" and _is_video(value)):
        return [value]
    return value


def _is_video(value: Sequence[object]) -> bool:
    return has_metadata(value) or (len(value) > 0 and all(map(_is_frame, value)))


def _is_frame(value: object) -> bool:
    return isinstance(value, PILImage.Image) or getattr(value, "ndim", None) in (2, 3)


def _message(message: object, path: str, contents: dict[str, Any]) -> object:
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), (list, tuple)):
        return message
    parts = [_part(part, f"{path}.content[{index}]", contents) for index, part in enumerate(message["content"])]
    return {**message, "content": parts}


def _part(part: object, path: str, contents: dict[str, Any]) -> object:
    name = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and isinstance(part.get("file"), Mapping):
        return {**part, "file": {key: _file_value(value) for key, value in part["file"].items()}}
    if not isinstance(part, Mapping) or not isinstance(name, str) or name not in _OBJECT_PARTS or _is_text(part):
        return part
    kind = _OBJECT_PARTS[name]
    value = part.get(name)
    if _is_object(value):
        contents[path] = value
    options = {key: option for key, option in part.items() if key not in {"type", name, "uuid"}}
    return _json_part(kind, value, options, part.get("uuid"), path)


def _file_value(value: object) -> object:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value) if isinstance(value, Path) else value


def _is_text(part: Mapping[str, Any]) -> bool:
    rows = part.get("image_embeds")
    rows = rows.get("image_embeds") if isinstance(rows, Mapping) else rows
    return part["type"] == "image_embeds" and (rows is None or isinstance(rows, str))


def _json_part(kind: Kind, value: object, options: Mapping[str, Any], uuid: str | None, path: str) -> dict[str, Any]:
    """Return a content part in its JSON form. Its URL is a placeholder if `_is_object(value)`.

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
        source["url"] = _OBJECT_URL if _is_object(value) else _url(value)
    return {"type": f"{kind}_url", f"{kind}_url": source or None, "uuid": uuid}


def _media_part(kind: Kind, value: object, uuid: str | None, path: str) -> MediaPart:
    """Return a content part for a rendered prompt; `value` can also be qwen-vl-utils' `{"image": ..., options}`.

    Raises:
        InvalidParameter, UnsupportedParameter: as `_json_part`, or an option is out of range.
    """
    options: Mapping[str, Any] = {}
    if isinstance(value, Mapping) and kind in value:
        options = {name: option for name, option in value.items() if name not in {kind, "type"}}
        value = value[kind]
    try:
        part = Part.model_validate(_json_part(kind, value, options, uuid, path))
    except ValidationError as error:
        cause = explain(error)
        raise InvalidParameter(f"In `{path}`: {cause.message}", param=f"{path}.{cause.param}") from None
    part.check("user", path)
    (media,) = part.media(path)
    return replace(media, url=None, content=value) if _is_object(value) else replace(media, url_field="")


def _is_object(value: object) -> bool:
    return not (
        value is None or _is_source(value) or (isinstance(value, (list, tuple)) and all(map(_is_source, value)))
    )


def _is_source(value: object) -> bool:
    return isinstance(value, (str, Path))


def _url(value: Any) -> str | list[str]:
    return str(value) if _is_source(value) else [str(frame) for frame in value]
