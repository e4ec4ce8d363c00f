"""Coordinates in messages: from pixels of the original image to those of the model."""

from __future__ import annotations

from typing import Any

from ..models.coordinates import ImageCoordinates

_CONVERTED_ROLES = frozenset({"user", "assistant", "tool"})


def with_model_coordinates(messages: list[dict[str, Any]], image: ImageCoordinates) -> list[dict[str, Any]]:
    """Return messages of `ChatRequest.template_messages` with the model's coordinates.

    The text of users, tools and the assistant is converted, and the arguments of earlier tool calls. System messages
    are instructions, and are not.
    """
    return [_message(message, image) if message["role"] in _CONVERTED_ROLES else message for message in messages]


def _message(message: dict[str, Any], image: ImageCoordinates) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        content = image.text_to_model(content)
    else:
        content = [{**part, "text": image.text_to_model(part["text"])} if "text" in part else part for part in content]
    converted = {**message, "content": content}
    if "tool_calls" in message:
        converted["tool_calls"] = [_call(call, image) for call in message["tool_calls"]]
    return converted


def _call(call: dict[str, Any], image: ImageCoordinates) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": image.text_to_model(function["arguments"])}}
