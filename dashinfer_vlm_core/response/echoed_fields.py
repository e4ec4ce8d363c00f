"""The fields of a response of the Responses API that repeat its request."""

from __future__ import annotations

from typing import Any

from ..protocol.request import ChatRequest
from ..protocol.responses import ResponsesRequest, TextFormat, ToolSelection

_SAME_IN_RESPONSE = (
    "instructions", "max_output_tokens", "max_tool_calls", "parallel_tool_calls", "previous_response_id",
    "prompt_cache_key", "safety_identifier", "top_logprobs", "truncation", "user",
)  # fmt: skip
_WITH_DEFAULTS_OF_CHAT = ("frequency_penalty", "presence_penalty", "temperature", "top_p")


def echoed_fields(request: ResponsesRequest, chat: ChatRequest) -> dict[str, Any]:
    """Return the fields of a response that repeat its request. Clients expect all of them, so nulls are explicit."""
    fields = {name: getattr(request, name) for name in _SAME_IN_RESPONSE}
    fields |= {name: getattr(chat, name) for name in _WITH_DEFAULTS_OF_CHAT}
    return fields | {
        "object": "response",
        "background": request.background,
        "metadata": dict(request.metadata),
        "reasoning": {"effort": chat.reasoning_effort, "summary": request.reasoning.summary},
        "service_tier": "default",
        "text": {"format": _text_format(request.text.format), "verbosity": request.text.verbosity},
        "tool_choice": _tool_choice(request.tool_choice),
        "tools": [
            tool.model_dump(include={"type", "name", "description", "parameters"}) | {"strict": tool.strict or False}
            for tool in request.tools
        ],
    }


def _tool_choice(choice: str | ToolSelection) -> str | dict[str, Any]:
    if not isinstance(choice, ToolSelection):
        return choice
    if choice.type == "function":
        return choice.model_dump(include={"type", "name"})
    return choice.model_dump(include={"type": True, "mode": True, "tools": {"__all__": {"type", "name"}}})


def _text_format(text_format: TextFormat) -> dict[str, Any]:
    if text_format.type != "json_schema":
        return {"type": text_format.type}
    fields = text_format.model_dump(include={"type", "name", "json_schema", "description"})
    return fields | {"strict": text_format.strict or False}
