"""Messages of Anthropic's API and their content blocks, and their conversion to messages of a chat request."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from .base import Array, Name, RequestModel, StringOrArray, Text
from .converted import ConvertedMessage
from .field_names import UnknownMedia
from .fields import RETURNED_FIELDS, RejectedFields, reject_fields
from .messages import MAX_PARTS
from .sources import PruningRate
from .validation_errors import invalid, show, unsupported

_UNKNOWN_MEDIA = UnknownMedia(
    image='{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "..."}}',
    video='{"type": "video", "source": {"type": "base64", "media_type": "video/mp4", "data": "..."}}',
    document='{"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "..."}}',
)

_REJECTED_IN_MEDIA: RejectedFields = {
    "context": ((), "Send it as a text block."),
    "transformations": ((), "Images are not cropped or rotated. Limit their size with `mm_processor_kwargs`."),
    "citations": (({"enabled": False},), "Responses have no citations. Remove it."),
}

_MEDIA_TYPES: Mapping[str, str] = {"image": "image/", "video": "video/", "document": "application/pdf"}
"""Types of blocks with media, each with what the `media_type` of its base64 begins with."""

_MEDIA_SOURCES = {"base64": "data", "url": "url"}
"""Types of sources with media, each with the field that has the content."""


class Source(RequestModel):
    """Where the content of an image, a video or a document is. The chat request that it becomes checks it."""

    type: Text
    data: Text | None = None
    media_type: Text | None = None
    url: Text | None = None
    pruning_rate: PruningRate | None = None
    content: StringOrArray[Text, Annotated[Array[Block], Field(max_length=MAX_PARTS)]] | None = None
    file_id: Any = None


class Block(RequestModel):
    """A content block; `type` says which of the fields it has.

    `title` of a document, `is_error` of a tool result, `signature` and `cache_control` have no effect.
    """

    _accepted_fields: ClassVar[Collection[str]] = RETURNED_FIELDS | {"caller", "data", "is_error", "title"}
    _unknown_media: ClassVar[UnknownMedia | None] = replace(_UNKNOWN_MEDIA, by_value=True)

    type: Text
    text: Text | None = None
    source: Source | None = None
    context: Text | None = None
    citations: Any = None
    transformations: Any = None
    thinking: Text | None = None
    id: Name | None = None
    name: Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Name | None = None
    content: Blocks | None = None


Blocks: TypeAlias = StringOrArray[Text, Annotated[Array[Block], Field(max_length=MAX_PARTS)]]
Source.model_rebuild()
Block.model_rebuild()


class AnthropicMessage(RequestModel):
    """A message: a text or content blocks."""

    _unknown_media: ClassVar[UnknownMedia | None] = _UNKNOWN_MEDIA

    role: Literal["user", "assistant", "system"]
    content: Blocks


_Part: TypeAlias = tuple[dict[str, Any], list[tuple[str, str]]]
"""A content part of a chat request, and pairs of a path in it and in the request that it is from."""


class MessageConverter:
    """Converts messages to messages of a chat request.

    Each tool result becomes a message. Blocks of the assistant become its reasoning, text and tool calls.

    Attributes:
        messages: the messages so far.
    """

    def __init__(self) -> None:
        self.messages: list[ConvertedMessage] = []
        self._call_ids: set[str] = set()

    def add_system(self, content: Blocks, path: str) -> None:
        """Add instructions, whose text blocks become one text, as chat templates expect.

        Raises:
            InvalidParameter: a block is not text.
        """
        text = content if isinstance(content, str) else "".join(_texts(content, path))
        self.messages.append(ConvertedMessage({"role": "system", "content": text}, [("", path)]))

    def add(self, message: AnthropicMessage, path: str) -> None:
        """Add a message.

        Args:
            message: the message.
            path: where the request has it, such as `messages[0]`.

        Raises:
            InvalidParameter: a field that its type requires is missing, or it is the result of an unknown call.
            UnsupportedParameter: the type of a block or of a source is not supported.
        """
        content_path = f"{path}.content"
        if message.role == "system":
            self.add_system(message.content, content_path)
        elif isinstance(message.content, str):
            body = {"role": message.role, "content": message.content}
            self.messages.append(ConvertedMessage(body, [("", path)]))
        elif message.role == "assistant":
            self._add_answer(message.content, path)
        else:
            self._add_user(message.content, path)

    def _add_user(self, blocks: tuple[Block, ...], path: str) -> None:
        parts: list[_Part] = []
        for index, block in enumerate(blocks):
            block_path = f"{path}.content[{index}]"
            if block.type == "tool_result":
                self._add_parts("user", parts, path)
                parts = []
                self._add_result(block, block_path)
            else:
                parts += _parts(block, block_path)
        if parts or not blocks:
            self._add_parts("user", parts, path, required=True)

    def _add_parts(self, role: str, parts: list[_Part], path: str, *, required: bool = False, **fields: Any) -> None:
        if not parts and not required:
            return
        sources = [
            (f".content[{index}]{suffix}", source)
            for index, (_, renames) in enumerate(parts)
            for suffix, source in renames
        ]
        body = {"role": role, "content": [part for part, _ in parts], **fields}
        self.messages.append(ConvertedMessage(body, [*sources, ("", path)]))

    def _add_result(self, block: Block, path: str) -> None:
        call_id = _required(block, "tool_use_id", path)
        if call_id not in self._call_ids:
            raise invalid(
                f"{path}.tool_use_id",
                f"is {show(call_id)}, but no earlier `tool_use` block has this ID. Send the message with it, too.",
            )
        fields = {"tool_call_id": call_id}
        if not block.content or isinstance(block.content, str):
            body = {"role": "tool", "content": block.content or "", **fields}
            self.messages.append(ConvertedMessage(body, [("", path)]))
            return
        blocks = enumerate(block.content)
        parts = [part for index, item in blocks for part in _parts(item, f"{path}.content[{index}]")]
        self._add_parts("tool", parts, path, **fields)

    def _add_answer(self, blocks: tuple[Block, ...], path: str) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        sources: list[tuple[str, str]] = []
        for index, block in enumerate(blocks):
            block_path = f"{path}.content[{index}]"
            if block.type == "text":
                texts.append(_required(block, "text", block_path))
            elif block.type == "thinking":
                thoughts.append(_required(block, "thinking", block_path))
            elif block.type == "tool_use":
                call = f".tool_calls[{len(calls)}]"
                calls.append(_call(block, block_path))
                sources += [
                    (f"{call}.function.arguments", f"{block_path}.input"),
                    (f"{call}.function", block_path),
                    (call, block_path),
                ]
            elif block.type != "redacted_thinking":  # encrypted by another provider
                raise _wrong_type(block, block_path, _ANSWER_BLOCKS)
        self._call_ids |= {call["id"] for call in calls}
        body = {
            "role": "assistant",
            "content": "".join(texts) if texts or not calls else None,
            "reasoning_content": "\n\n".join(filter(None, thoughts)) or None,
            "tool_calls": calls or None,
        }
        self.messages.append(ConvertedMessage(body, [*sources, ("", path)]))


def _call(block: Block, path: str) -> dict[str, Any]:
    arguments = json.dumps(_required(block, "input", path), ensure_ascii=False)
    function = {"name": _required(block, "name", path), "arguments": arguments}
    return {"id": _required(block, "id", path), "type": "function", "function": function}


_ANSWER_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use")
_CONTENT_BLOCKS = ("text", *_MEDIA_TYPES)


def _parts(block: Block, path: str) -> list[_Part]:
    if block.type == "text":
        return [_text_part(_required(block, "text", path), path)]
    if block.type not in _MEDIA_TYPES:
        raise _wrong_type(block, path, (*_CONTENT_BLOCKS, "tool_result"))
    source: Source = _required(block, "source", path)
    reject_fields(vars(block), _REJECTED_IN_MEDIA, prefix=f"{path}.")
    if block.type == "document" and source.pruning_rate is not None:
        raise unsupported(f"{path}.source.pruning_rate", "is not available for a document. Remove it.")
    if block.type == "document" and source.type in {"text", "content"}:
        return _document_parts(source, f"{path}.source")
    return [_media_part(block.type, source, path)]


def _document_parts(source: Source, path: str) -> list[_Part]:
    name = "data" if source.type == "text" else "content"
    content = _required(source, name, path)
    if isinstance(content, str):
        return [_text_part(content, f"{path}.{name}")]
    return [part for index, block in enumerate(content) for part in _parts(block, f"{path}.content[{index}]")]


def _text_part(text: str, path: str) -> _Part:
    return {"type": "text", "text": text}, [("", path)]


def _media_part(kind: str, source: Source, path: str) -> _Part:
    source_path = f"{path}.source"
    name = _MEDIA_SOURCES.get(source.type)
    if name is None:
        raise unsupported(
            f"{source_path}.type",
            f"must be one of {', '.join(_MEDIA_SOURCES)}; got {show(source.type)}. Files are not stored.",
        )
    content = _required(source, name, source_path)
    if source.type == "base64":
        content = f"data:{_media_type(kind, source, source_path)};base64,{content}"
    field, key = (f"{kind}_url", "url") if kind != "document" else ("file", f"file_{name}")
    renames = [(f".{field}.{key}", f"{source_path}.{name}"), (f".{field}", source_path), ("", path)]
    return {"type": field, field: {key: content, "pruning_rate": source.pruning_rate}}, renames


def _media_type(kind: str, source: Source, path: str) -> str:
    media_type: str = _required(source, "media_type", path)
    if not media_type.startswith(_MEDIA_TYPES[kind]):
        raise invalid(
            f"{path}.media_type",
            f"of a block of the type {kind!r} must begin with {_MEDIA_TYPES[kind]!r}; got {show(media_type)}.",
        )
    return media_type


def _texts(blocks: Iterable[Block], path: str) -> Iterable[str]:
    for index, block in enumerate(blocks):
        block_path = f"{path}[{index}]"
        if block.type != "text":
            raise _wrong_type(block, block_path, ("text",))
        yield _required(block, "text", block_path)


def _wrong_type(block: Block, path: str, allowed: Iterable[str]) -> Exception:
    return unsupported(f"{path}.type", f"must be one of {', '.join(allowed)} here; got {show(block.type)}.")


def _required(value: Block | Source, name: str, path: str) -> Any:
    found = getattr(value, name)
    if found is None:
        raise invalid(f"{path}.{name}", f"is required with the type {value.type!r}.")
    return found
