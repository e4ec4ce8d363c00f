"""LangChain's messages -> those of OpenAI's request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from dashinfer_vlm_core.errors import InvalidParameter, UnsupportedParameter

Json: TypeAlias = dict[str, Any]

_SIZE = frozenset({"min_pixels", "max_pixels", "min_pixel", "max_pixel"})
OPTIONS: Mapping[str, frozenset[str]] = MappingProxyType(
    {"image": _SIZE | {"detail"}, "video": _SIZE | {"fps", "num_frames", "total_pixels"}}
)
"""What the `extras` of a standard block may hold, beside `uuid`; others would be lost."""

_FRAME = frozenset({"type", "url", "base64", "data", "mime_type", "source_type", "id", "index", "file_id", "extras"})
"""Keys of a standard block that are not options; `source_type` and `data` are those of version 0."""

_AS_IS = frozenset({"text", "image_url", "video_url", "image_embeds"})
_NOT_SAID = frozenset({"tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use", "function_call"})
_THOUGHT = frozenset({"reasoning", "thinking"})
_REFUSED = MappingProxyType(
    {
        "audio": "These models do not hear: leave it out.",
        "input_audio": "These models do not hear: leave it out.",
        "file": "Send pictures and videos as blocks of these types, and text as text.",
    }
)


def to_openai(messages: Sequence[BaseMessage]) -> list[Json]:
    """The messages as OpenAI's JSON, one for one, so that `messages[2]` of an error is the third of the caller's.

    Raises:
        InvalidParameter: a block lacks what its type needs.
        UnsupportedParameter: a message or a block is of a type that cannot be sent; `param` is its place.
    """
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: BaseMessage, where: str) -> Json:
    if isinstance(message, AIMessage):
        sent = {"role": "assistant", "content": _said(message, where), "tool_calls": _calls(message)}
    elif isinstance(message, ToolMessage):
        sent = {"role": "tool", "content": _content(message, where), "tool_call_id": message.tool_call_id}
    else:
        sent = {"role": _role(message, where), "content": _content(message, where)}
    return {key: value for key, value in (sent | {"name": message.name}).items() if value or key == "content"}


def _role(message: BaseMessage, where: str) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    if isinstance(message, SystemMessage):
        return str(message.additional_kwargs.get("__openai_role__", "system"))
    if isinstance(message, HumanMessage):
        return "user"
    raise UnsupportedParameter(
        f"`{where}` is a {type(message).__name__}, which cannot be sent: use one of the system, the user, the model"
        " or a tool.",
        param=where,
    )


# What the model said


def _said(message: AIMessage, where: str) -> str:
    """Its text alone: calls are sent for themselves, and thoughts of other models are not this one's."""
    if isinstance(message.content, str):
        return message.content
    return "".join(_said_in(block, f"{where}.content[{i}]") for i, block in enumerate(message.content))


def _said_in(block: str | Json, where: str) -> str:
    if isinstance(block, str):
        return block
    kind = block.get("type")
    if kind in {"text", "refusal"}:
        return str(block.get(kind, ""))
    if kind in _NOT_SAID | _THOUGHT:
        return ""
    raise _unsupported(kind, where, "Messages of the model hold text and calls.")


def _calls(message: AIMessage) -> list[Json]:
    """The calls, those with arguments that are no JSON too: the model may learn from its mistake."""
    valid = [(call["id"], call["name"], json.dumps(call["args"], ensure_ascii=False)) for call in message.tool_calls]
    invalid = [(call["id"], call["name"] or "", call["args"] or "") for call in message.invalid_tool_calls]
    return [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id_, name, arguments in [*valid, *invalid]
    ]


# What it is shown


def _content(message: BaseMessage, where: str) -> str | list[Json]:
    if isinstance(message.content, str):
        return message.content
    return [_part(block, f"{where}.content[{index}]") for index, block in enumerate(message.content)] or ""


def _part(block: str | Json, where: str) -> Json:
    if isinstance(block, str):
        return {"type": "text", "text": block}
    kind = str(block.get("type"))
    if kind in _AS_IS:
        return block
    if kind == "text-plain" and "text" in block:
        return {"type": "text", "text": block["text"]}
    if kind in OPTIONS:
        return _media(kind, block, where)
    raise _unsupported(kind, where, _REFUSED.get(kind, "Send text, pictures and videos."))


def _media(kind: str, block: Json, where: str) -> Json:
    """A standard block, of version 1 or 0, as a part with our options."""
    flat = {key: value for key, value in block.items() if key not in _FRAME}
    options = flat | (block.get("extras") or {})
    uuid = options.pop("uuid", None)
    if unknown := options.keys() - OPTIONS[kind]:
        name = min(unknown)
        raise UnsupportedParameter(
            f"`{where}.extras.{name}` is no option of a block of type {kind}: leave it out, or use one of"
            f" {', '.join(sorted(OPTIONS[kind] | {'uuid'}))}.",
            param=f"{where}.extras.{name}",
        )
    url = _url(block, where, known=uuid is not None)
    part = {"type": f"{kind}_url", f"{kind}_url": {**({"url": url} if url else {}), **options}}
    return part | ({"uuid": uuid} if uuid is not None else {})


def _url(block: Json, where: str, *, known: bool) -> str | list[Any] | None:
    """Where a picture or video is; None where it goes by its `uuid` alone."""
    if block.get("url"):
        return block["url"]  # type: ignore[no-any-return]  # a list of frames too: the engine looks at it
    if data := block.get("base64") or block.get("data"):
        if not block.get("mime_type"):
            raise InvalidParameter(
                f"`{where}.mime_type` is required beside base64, such as {block['type']}/"
                f"{'png' if block['type'] == 'image' else 'mp4'}.",
                param=f"{where}.mime_type",
            )
        return f"data:{block['mime_type']};base64,{data}"
    if "file_id" in block or block.get("source_type") == "id":
        raise UnsupportedParameter(
            f"`{where}.file_id` is not supported: no files are kept here. Give `url` or `base64`.",
            param=f"{where}.file_id",
        )
    if known:
        return None
    raise InvalidParameter(f"`{where}` needs `url`, or `base64` with `mime_type`.", param=where)


def _unsupported(kind: object, where: str, next_step: str) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"`{where}` is of type {str(kind)[:40]!r}, which cannot be sent. {next_step}", param=f"{where}.type"
    )
