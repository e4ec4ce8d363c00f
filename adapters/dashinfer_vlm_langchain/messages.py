"""Convert LangChain messages to OpenAI messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from dashinfer_vlm_core.errors import UnsupportedParameter
from dashinfer_vlm_core.protocol.validation_errors import invalid, show, unsupported

Json: TypeAlias = dict[str, Any]

_SIZE = frozenset({"min_pixels", "max_pixels", "min_pixel", "max_pixel"})
OPTIONS: Mapping[str, frozenset[str]] = {
    "image": _SIZE | {"detail", "pruning_rate"},
    "video": _SIZE | {"fps", "num_frames", "align", "total_pixels", "min_change", "pruning_rate"},
    "file": frozenset({"filename", "detail", "pages", "render", "dpi", "max_pixels", "password"}),
}
"""Keys of `extras` in a standard block, in addition to `uuid`. Other keys are rejected."""

_STANDARD_KEYS = frozenset(
    {"type", "url", "base64", "data", "mime_type", "source_type", "id", "index", "file_id", "extras"}
)
"""Keys of a standard block that are not options; `source_type` and `data` belong to version 0."""

_EXAMPLES: Mapping[str, str] = {"image": "image/png", "video": "video/mp4", "file": "application/pdf"}
_UNCHANGED = frozenset({"text", "image_url", "video_url", "input_video", "image_embeds"})
_CALLS = frozenset({"tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use", "function_call"})
_REASONING = frozenset({"reasoning", "thinking"})
_HINTS: Mapping[str, str] = {
    "audio": "Audio is not supported. Leave it out.",
    "input_audio": "Audio is not supported. Leave it out.",
}


def to_openai(messages: Sequence[BaseMessage]) -> list[Json]:
    """Convert the messages to OpenAI's JSON, one to one, so that indices in error messages match the caller's list.

    Raises:
        InvalidParameter: a block lacks a required key.
        UnsupportedParameter: the type of a message or a block is not supported; `param` is its path.
    """
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: BaseMessage, path: str) -> Json:
    if isinstance(message, AIMessage):
        sent = {"role": "assistant", "content": _assistant_text(message, path), "tool_calls": _calls(message)}
    elif isinstance(message, ToolMessage):
        sent = {"role": "tool", "content": _content(message, path), "tool_call_id": message.tool_call_id}
    else:
        sent = {"role": _role(message, path), "content": _content(message, path)}
    return {key: value for key, value in (sent | {"name": message.name}).items() if value or key == "content"}


def _role(message: BaseMessage, path: str) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    if isinstance(message, SystemMessage):
        return str(message.additional_kwargs.get("__openai_role__", "system"))
    if isinstance(message, HumanMessage):
        return "user"
    raise unsupported(
        path,
        f"is a {type(message).__name__}, which is not supported. Use a system, human, AI, tool or chat message.",
    )


# Assistant messages


def _assistant_text(message: AIMessage, path: str) -> str:
    """Return the text of a message. Tool calls are sent separately, and reasoning is not sent."""
    if isinstance(message.content, str):
        return message.content
    return "".join(_assistant_block_text(block, f"{path}.content[{i}]") for i, block in enumerate(message.content))


def _assistant_block_text(block: str | Json, path: str) -> str:
    if isinstance(block, str):
        return block
    kind = block.get("type")
    if kind in {"text", "refusal"}:
        return str(block.get(kind, ""))
    if kind in _CALLS | _REASONING:
        return ""
    raise _unsupported(kind, path, "Assistant messages contain text and tool calls.")


def _calls(message: AIMessage) -> list[Json]:
    """Return the tool calls, including those with invalid JSON, so that the model can correct them."""
    valid = [(call["id"], call["name"], json.dumps(call["args"], ensure_ascii=False)) for call in message.tool_calls]
    invalid = [(call["id"], call["name"] or "", call["args"] or "") for call in message.invalid_tool_calls]
    return [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id_, name, arguments in [*valid, *invalid]
    ]


# Other messages


def _content(message: BaseMessage, path: str) -> str | list[Json]:
    if isinstance(message.content, str):
        return message.content
    return [_part(block, f"{path}.content[{index}]") for index, block in enumerate(message.content)] or ""


def _part(block: str | Json, path: str) -> Json:
    if isinstance(block, str):
        return {"type": "text", "text": block}
    kind = str(block.get("type"))
    if kind in _UNCHANGED or (kind == "file" and "file" in block):
        return block
    if kind == "text-plain" and "text" in block:
        return {"type": "text", "text": block["text"]}
    if kind in OPTIONS:
        return _media(kind, block, path)
    raise _unsupported(kind, path, _HINTS.get(kind, "Send text, images, videos and PDF files."))


def _media(kind: str, block: Json, path: str) -> Json:
    flat = {key: value for key, value in block.items() if key not in _STANDARD_KEYS}
    options = flat | (block.get("extras") or {})
    uuid = options.pop("uuid", None)
    if kind == "file":  # langchain-core converts OpenAI's blocks, whose other fields get this prefix
        options = {name.removeprefix("file_"): option for name, option in options.items()}
    if unknown := options.keys() - OPTIONS[kind]:
        known = ", ".join(sorted(OPTIONS[kind] | {"uuid"}))
        raise unsupported(
            f"{path}.extras.{min(unknown)}",
            f"is not an option of a block of type {kind}. Leave it out, or use one of {known}.",
        )
    url = _url(block, path, optional=uuid is not None)
    if kind == "file":
        name = "file_url" if block.get("url") else "file_data"
        return {"type": "file", "file": {name: url, "format": block.get("mime_type"), **options}}
    part = {"type": f"{kind}_url", f"{kind}_url": {**({"url": url} if url else {}), **options}}
    return part | ({"uuid": uuid} if uuid is not None else {})


def _url(block: Json, path: str, *, optional: bool) -> str | list[Any] | None:
    if block.get("url"):
        return block["url"]  # type: ignore[no-any-return]  # may be a list of frames, which the engine validates
    if data := block.get("base64") or block.get("data"):
        if not block.get("mime_type"):
            raise invalid(f"{path}.mime_type", f"is required with `base64`, such as {_EXAMPLES[block['type']]}.")
        return f"data:{block['mime_type']};base64,{data}"
    if "file_id" in block or block.get("source_type") == "id":
        raise unsupported(f"{path}.file_id", "is not supported. Use `url` or `base64`.")
    if optional:
        return None
    raise invalid(path, "requires `url`, or `base64` with `mime_type`.")


def _unsupported(kind: object, path: str, next_step: str) -> UnsupportedParameter:
    return unsupported(f"{path}.type", f"is {show(kind)}, which is not supported. {next_step}")
