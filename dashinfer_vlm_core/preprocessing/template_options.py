"""The variables of a chat template that a request sets, above all those for reasoning."""

from __future__ import annotations

from typing import Any

from ..errors import InvalidParameter, UnsupportedParameter
from ..protocol import ChatRequest
from ..protocol.thinking import Thinking
from ..tokenization.chat_template import ChatTemplate


class TemplateOptions:
    """Converts fields of requests to variables of a chat template.

    Args:
        template: the template.
        supports_reasoning: whether completions may begin with reasoning.
    """

    def __init__(self, template: ChatTemplate, *, supports_reasoning: bool) -> None:
        self._names = template.options
        self._supports_reasoning = supports_reasoning

    def of(self, request: ChatRequest) -> dict[str, Any]:
        """Return the values of the variables."""
        options = self._for_effort(request.reasoning_effort) | self._for_thinking(request.thinking)
        return options | request.chat_template_kwargs

    def check(self, request: ChatRequest) -> None:
        """Check that the chat template uses the options that a request sets.

        Raises:
            InvalidParameter: it does not use an option.
        """
        for name in request.chat_template_kwargs:
            if name not in self._names:
                known = ", ".join(sorted(self._names)) or "none"
                raise InvalidParameter(
                    f"`chat_template_kwargs.{name}` is not a variable of the model's chat template. Remove it."
                    f" Variables of the template: {known}.",
                    param=f"chat_template_kwargs.{name}",
                )
        effort = request.reasoning_effort
        if effort is not None and not self._for_effort(effort) and (effort != "none" or self._supports_reasoning):
            raise self._cannot_reason("reasoning_effort")
        thinking = request.thinking
        if thinking and thinking.type == "enabled" and not self._supports_reasoning:
            raise self._cannot_reason("thinking")
        if thinking and thinking.type == "disabled" and self._supports_reasoning and not self._for_effort("none"):
            raise self._cannot_reason("thinking")

    def _for_effort(self, effort: str | None) -> dict[str, Any]:
        if effort is not None and "reasoning_effort" in self._names:
            return {"reasoning_effort": effort}
        if effort == "none" and "enable_thinking" in self._names:
            return {"enable_thinking": False}
        return {}

    def _for_thinking(self, thinking: Thinking | None) -> dict[str, Any]:
        if thinking and thinking.type == "disabled":
            return self._for_effort("none")
        is_enabled = thinking is not None and thinking.type == "enabled"
        return {"enable_thinking": True} if is_enabled and "enable_thinking" in self._names else {}

    def _cannot_reason(self, name: str) -> UnsupportedParameter:
        reason = "the model does not have a reasoning phase"
        if self._supports_reasoning:
            reason = "the model's chat template cannot change how much the model reasons"
        return UnsupportedParameter(f"`{name}` is not supported: {reason}. Remove it.", param=name)
