"""Requests of other APIs as chat requests, and the paths of their fields in errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from .request import ChatRequest
from .validation_errors import renamed_errors


@dataclass(slots=True, eq=False)
class ConvertedMessage:
    """A message of a chat request.

    Attributes:
        body: the message as JSON.
        sources: pairs of a path within the message and the path that it has in the request that it is from.
    """

    body: dict[str, Any]
    sources: list[tuple[str, str]] = field(default_factory=list)

    @property
    def is_instruction(self) -> bool:
        return self.body["role"] in {"system", "developer"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatCall:
    """A chat request in place of a request of another API.

    Attributes:
        chat: the chat request.
        rename: returns the path in the other request for a path in the chat request.
    """

    chat: ChatRequest
    rename: Callable[[str], str]

    def renamed_errors(self) -> AbstractContextManager[None]:
        """Return a context in which errors about the chat request name the fields of the other request."""
        return renamed_errors(self.rename)


def join_instructions(messages: Sequence[ConvertedMessage]) -> list[ConvertedMessage]:
    """Return the messages with the texts of the first instructions joined: some chat templates accept only one."""
    leading = list(takewhile(lambda message: message.is_instruction, messages))
    texts = [message.body["content"] for message in leading]
    if len(texts) < 2 or not all(isinstance(text, str) for text in texts):
        return list(messages)
    joined = ConvertedMessage({"role": "system", "content": "\n\n".join(filter(None, texts))}, leading[0].sources)
    return [joined, *messages[len(leading) :]]


def message_renames(messages: Sequence[ConvertedMessage]) -> Iterator[tuple[str, str]]:
    """Yield pairs of a path in the chat request, and its path in the request that the messages are from."""
    for index, message in enumerate(messages):
        for suffix, path in message.sources:
            yield f"messages[{index}]{suffix}", path


def rename_prefix(path: str, renames: Iterable[tuple[str, str]]) -> str:
    """Replace the beginning of a path by the first pair that matches whole steps of it."""
    for old, new in renames:
        if path == old or path.startswith((f"{old}.", f"{old}[")):
            return new + path.removeprefix(old)
    return path
