"""Messages of Ollama's API, and their conversion to messages of a chat request."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from .base import Array, Name, RequestModel, Text
from .converted import ConvertedMessage
from .field_names import UnknownMedia
from .fields import RETURNED_FIELDS
from .messages import MAX_PARTS, MAX_TOOL_CALLS
from .validation_errors import invalid, show

_PNG = "data:image/png;base64,"
"""The type has no effect: the format is detected from the content."""

_MAX_SCHEME = 16
"""Number of characters of an image that are searched for the colon of a URL, which base64 does not have."""

UNKNOWN_MEDIA = UnknownMedia(
    image='`"images": ["BASE64"]`',
    video="the frames of a video as `images`, or use /v1/chat/completions",
    document="the pages of a document as `images`, or use /v1/chat/completions",
)

Images = Annotated[Array[Text], Field(max_length=MAX_PARTS)]
"""Image files in base64."""


class OllamaFunction(RequestModel):
    name: Name
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaToolCall(RequestModel):
    """A tool call that the assistant made earlier in the conversation."""

    _accepted_fields: ClassVar[Collection[str]] = RETURNED_FIELDS | {"type"}

    id: Text | None = None
    function: OllamaFunction


class OllamaMessage(RequestModel):
    """A message: a text, images, and of the assistant its reasoning and tool calls."""

    _unknown_media: ClassVar[UnknownMedia | None] = UNKNOWN_MEDIA

    role: Literal["system", "user", "assistant", "tool"]
    content: Text = ""
    thinking: Text | None = None
    images: Images = ()
    tool_calls: Annotated[Array[OllamaToolCall], Field(max_length=MAX_TOOL_CALLS)] = ()
    tool_name: Name | None = None
    tool_call_id: Name | None = None


def convert_messages(messages: Iterable[OllamaMessage]) -> list[ConvertedMessage]:
    """Convert messages to messages of a chat request.

    Raises:
        InvalidParameter: an image is not base64.
    """
    converted: list[ConvertedMessage] = []
    num_calls = 0
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        result = _with_content(message, path)
        calls = [_call(call, num_calls + number) for number, call in enumerate(message.tool_calls)]
        num_calls += len(calls)
        result.body |= {
            "reasoning_content": message.thinking or None,
            "tool_calls": calls or None,
            "name": message.tool_name,
            "tool_call_id": message.tool_call_id,
        }
        converted.append(result)
    return converted


def _with_content(message: OllamaMessage, path: str) -> ConvertedMessage:
    names = [(".reasoning_content", f"{path}.thinking"), (".name", f"{path}.tool_name")]
    if not message.images:
        return ConvertedMessage({"role": message.role, "content": message.content}, [*names, ("", path)])
    parts, sources = convert_parts(
        message.images, message.content, images_path=f"{path}.images", text_path=f"{path}.content"
    )
    return ConvertedMessage({"role": message.role, "content": parts}, [*names, *sources, ("", path)])


def convert_parts(
    images: Sequence[str], text: str, *, images_path: str, text_path: str
) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """Return the content parts of a message with images, which precede the text, as in Ollama's templates.

    Args:
        images: the images in base64.
        text: the text; no part if it is empty.
        images_path, text_path: where the request has them.

    Returns:
        The parts, and pairs of a path in the message and in the request that it is from.

    Raises:
        InvalidParameter: an image is not base64.
    """
    parts: list[dict[str, Any]] = []
    sources: list[tuple[str, str]] = []
    for index, image in enumerate(images):
        path = f"{images_path}[{index}]"
        parts.append({"type": "image_url", "image_url": {"url": _url(image, path)}})
        sources += [(f".content[{index}]{suffix}", path) for suffix in (".image_url.url", ".image_url", "")]
    if text:
        sources.append((f".content[{len(parts)}]", text_path))
        parts.append({"type": "text", "text": text})
    return parts, sources


def _url(image: str, path: str) -> str:
    if ":" in image[:_MAX_SCHEME]:
        raise invalid(path, f"must be an image file in base64, without `data:` and not another URL; got {show(image)}.")
    return _PNG + image


def _call(call: OllamaToolCall, number: int) -> dict[str, Any]:
    """Return a call with its ID, or one made up from its number: Ollama's clients need not send one."""
    function = {"name": call.function.name, "arguments": json.dumps(call.function.arguments, ensure_ascii=False)}
    return {"id": call.id or f"call_{number}", "type": "function", "function": function}
