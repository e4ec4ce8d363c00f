"""Limits on the arguments of tool calls in messages, whose JSON text is parsed for the chat template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..errors import InvalidParameter
from .json_limits import MAX_CHARACTERS, MAX_VALUES, TOO_MANY_VALUES, JsonLimitExceeded, count_values
from .messages import Message


def check_tool_arguments(messages: Iterable[Message]) -> None:
    """Reject arguments that are nested too deeply, or together would take far more memory than their text.

    Raises:
        InvalidParameter: the arguments of a call exceed a limit.
    """
    characters = values = 0
    for path, arguments in _arguments(messages):
        characters += len(arguments)
        try:
            if characters > MAX_CHARACTERS:
                raise JsonLimitExceeded(f"exceeds {MAX_CHARACTERS} characters, with all earlier calls. Send fewer.")
            values += count_values(arguments)
            if values > MAX_VALUES:
                raise JsonLimitExceeded(TOO_MANY_VALUES.replace(" values", " values, with all earlier calls"))
        except JsonLimitExceeded as error:
            raise InvalidParameter(f"`{path}` {error}", param=path) from None


def _arguments(messages: Iterable[Message]) -> Iterator[tuple[str, str]]:
    for index, message in enumerate(messages):
        for number, call in enumerate(message.tool_calls):
            yield f"messages[{index}].tool_calls[{number}].function.arguments", call.function.arguments
