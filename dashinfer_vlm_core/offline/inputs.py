"""What callers write for a prompt or a conversation -> OfflineRequest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image as PILImage

from ..errors import InvalidParameter, UnsupportedParameter
from ..media.types import Kind
from ..protocol import MediaPart, OfflineRequest
from ..protocol.fields import NO_AUDIO
from ..protocol.validation_errors import show
from .media import is_object, media_part, wire_part
from .params import SamplingParams

_KINDS: tuple[Kind, ...] = ("image", "video")
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
_OBJECT_PARTS: Mapping[str, Kind] = {"image_pil": "image", "image": "image", "image_embeds": "image", "video": "video"}


def is_one_prompt(prompts: object) -> bool:
    """Whether this is a prompt rather than several: text, token ids, or an object."""
    return isinstance(prompts, (str, Mapping)) or _is_ids(prompts)


def is_one_conversation(messages: object) -> bool:
    """Whether this is a list of messages rather than of conversations."""
    return isinstance(messages, (list, tuple)) and bool(messages) and isinstance(messages[0], Mapping)


def text_of(prompt: object) -> str | None:
    """The text of a prompt, if it is text."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def from_prompt(prompt: object, sampling: SamplingParams) -> OfflineRequest:
    """The request for one prompt of `VLM.generate`.

    Raises:
        InvalidParameter, UnsupportedParameter: it is none; `param` names the key, such as `multi_modal_data.image[0]`.
    """
    given = prompt if isinstance(prompt, Mapping) else {"prompt_token_ids" if _is_ids(prompt) else "prompt": prompt}
    for name in given:
        if name not in _PROMPT_KEYS:
            raise InvalidParameter(f"A prompt has no key {show(name)}: it may have {', '.join(_PROMPT_KEYS)}.")
    return _parse(
        sampling,
        prompt=_rendered(given),
        attached=_attached(given),
        mm_processor_kwargs=given.get("mm_processor_kwargs"),
    )


def from_messages(
    messages: object, sampling: SamplingParams, mm_processor_kwargs: Mapping[str, Any] | None
) -> OfflineRequest:
    """The request for one conversation of `VLM.chat`.

    Raises:
        InvalidParameter, UnsupportedParameter: it is none; `param` names the field, such as `messages[0].content[1]`.
    """
    contents: dict[str, Any] = {}
    if isinstance(messages, (list, tuple)):
        messages = [_message(message, f"messages[{index}]", contents) for index, message in enumerate(messages)]
    return _parse(sampling, messages=messages, contents=contents, mm_processor_kwargs=mm_processor_kwargs)


def _parse(sampling: SamplingParams, **fields: Any) -> OfflineRequest:
    request = OfflineRequest.parse({**sampling.fields(), **fields})
    assert isinstance(request, OfflineRequest)
    return request


def _is_ids(value: object) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(type(item) is int for item in value)


def _rendered(given: Mapping[str, Any]) -> str | tuple[int, ...]:
    text, ids = given.get("prompt"), given.get("prompt_token_ids")
    if isinstance(text, str) and ids is None:
        return text
    if text is None and _is_ids(ids):
        assert ids is not None
        return tuple(ids)
    raise InvalidParameter(
        "A prompt is text in `prompt`, or a list of token ids in `prompt_token_ids`: give one of them.", param="prompt"
    )


def _attached(given: Mapping[str, Any]) -> tuple[MediaPart, ...]:
    """The pictures, then the videos."""
    data = _by_kind(given, "multi_modal_data")
    uuids = _by_kind(given, "multi_modal_uuids")
    return tuple(part for kind in _KINDS for part in _of_kind(kind, data.get(kind), uuids.get(kind)))


def _by_kind(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = given.get(name) or {}
    if not isinstance(value, Mapping):
        raise InvalidParameter(f"`{name}` must be an object with `image` and `video`.", param=name)
    for kind in value:
        if kind not in _KINDS:
            step = NO_AUDIO if kind == "audio" else "It may have image and video."
            raise UnsupportedParameter(f"`{name}` cannot have {show(kind)}. {step}", param=f"{name}.{kind}")
    return value


def _of_kind(kind: Kind, value: object, uuids: object) -> list[MediaPart]:
    names = [uuids] if isinstance(uuids, str) else uuids
    if names is not None and not isinstance(names, (list, tuple)):
        raise InvalidParameter(
            f"`multi_modal_uuids.{kind}` must be a list of strings and None.", param=f"multi_modal_uuids.{kind}"
        )
    items: Sequence[object] = [None] * len(names or ()) if value is None else _items(kind, value)
    names = [None] * len(items) if names is None else names
    if len(names) != len(items):
        raise InvalidParameter(
            f"`multi_modal_uuids.{kind}` has {len(names)} entries for {len(items)} of `multi_modal_data.{kind}`: give"
            " one for each, or None.",
            param=f"multi_modal_uuids.{kind}",
        )
    return [
        media_part(kind, item, name, f"multi_modal_data.{kind}[{index}]")
        for index, (item, name) in enumerate(zip(items, names, strict=True))
    ]


def _items(kind: Kind, value: object) -> Sequence[object]:
    """One or several; a list of pictures under `video` is one video."""
    if not isinstance(value, (list, tuple)) or (kind == "video" and value and all(map(_is_frame, value))):
        return [value]
    return value


def _is_frame(value: object) -> bool:
    return isinstance(value, PILImage.Image) or getattr(value, "ndim", None) in (2, 3)


def _message(message: object, where: str, contents: dict[str, Any]) -> object:
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), (list, tuple)):
        return message
    parts = [_part(part, f"{where}.content[{index}]", contents) for index, part in enumerate(message["content"])]
    return {**message, "content": parts}


def _part(part: object, where: str, contents: dict[str, Any]) -> object:
    """A part as in JSON; an object in it is noted in `contents`, by its place."""
    name = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(name, str) or name not in _OBJECT_PARTS or _is_text(part):
        return part
    value, kind = part.get(name), _OBJECT_PARTS[name]
    if is_object(value):
        contents[where] = value
    options = {key: option for key, option in part.items() if key not in {"type", name, "uuid"}}
    return wire_part(kind, value, options, part.get("uuid"), where)


def _is_text(part: Mapping[str, Any]) -> bool:
    """Whether these are embeddings as JSON has them."""
    rows = part.get("image_embeds")
    rows = rows.get("image_embeds") if isinstance(rows, Mapping) else rows
    return part["type"] == "image_embeds" and (rows is None or isinstance(rows, str))
