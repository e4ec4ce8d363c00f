"""A conversation: messages, media attached to the next prompt, and request fields. It does no terminal I/O."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dashinfer_vlm_core.errors import InvalidParameter

from .media import Part

Message = dict[str, Any]

RESERVED_FIELDS = frozenset(
    {"messages", "model", "n", "stream", "stream_options", "tools", "tool_choice", "parallel_tool_calls", "logprobs",
     "top_logprobs"}
)  # fmt: skip
"""Request fields that a conversation does not set; `set` accepts `model`, which is not restored with a conversation."""


@dataclass(kw_only=True, slots=True)
class Conversation:
    """A conversation with a model.

    Attributes:
        messages: the messages so far, as OpenAI's JSON.
        options: request fields, such as `temperature`.
        attachments: images and videos for the next prompt.
    """

    messages: list[Message] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    attachments: list[Part] = field(default_factory=list)

    @property
    def request(self) -> Mapping[str, Any]:
        return {**self.options, "messages": self.messages}

    @property
    def num_prompts(self) -> int:
        return sum(message["role"] == "user" for message in self.messages)

    @property
    def system(self) -> str:
        """The system prompt; empty if there is none."""
        return str(self.messages[0]["content"]) if self.messages and self.messages[0]["role"] == "system" else ""

    def set_system(self, system: str) -> None:
        """Set the system prompt for the following responses; an empty text removes it."""
        others = [message for message in self.messages if message["role"] != "system"]
        self.messages = [*([{"role": "system", "content": system}] if system else []), *others]

    def add_user(self, text: str, parts: Sequence[Part] = ()) -> None:
        """Add a prompt: the attachments, other images and videos, then the text."""
        media = [*self.attachments, *parts]
        content = [*media, {"type": "text", "text": text}] if media else text
        self.messages.append({"role": "user", "content": content})
        self.attachments = []

    def add_assistant(self, text: str) -> None:
        """Add a response; remove the prompt of one without text."""
        if not text:
            self.undo()
            return
        self.messages.append({"role": "assistant", "content": text})

    def undo(self) -> bool:
        """Remove the last prompt and its response; return False if there is none."""
        return self._remove_after_prompt(0)

    def retry(self) -> bool:
        """Remove the last response, so that its prompt is the last message; return False if there is none."""
        return self._remove_after_prompt(1)

    def reset(self) -> None:
        """Remove all messages and attachments except the system prompt. Options stay."""
        self.messages = [message for message in self.messages if message["role"] == "system"]
        self.attachments = []

    def set(self, name: str, text: str) -> object:
        """Set a request field from text, which is parsed as JSON if possible, and return the value.

        An empty text unsets the field.

        Raises:
            RequestError: the field does not exist, or the value is invalid; with the engine's message.
        """
        from dashinfer_vlm_core.protocol import ChatRequest
        from dashinfer_vlm_core.structured_output.output_grammar import grammar_for_request

        known = sorted((set(ChatRequest.model_fields) - RESERVED_FIELDS) | {"model"})
        if name not in known:
            raise InvalidParameter(f"Unknown request field `{name}`. {_nearest(name, known)}", param=name)
        if not text:
            self.options.pop(name, None)
            return None
        value = _value(text)
        grammar_for_request(
            ChatRequest.parse({**self.options, name: value, "messages": [{"role": "user", "content": "?"}]})
        )
        self.options[name] = value
        return value

    def save(self, path: Path) -> None:
        """Write the conversation, including its images, as a request body.

        Raises:
            OSError: the file cannot be written.
        """
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(json.dumps(self.request, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Conversation:
        """Load a saved conversation, or any other request body.

        Raises:
            OSError: the file cannot be read.
            RequestError: the file is not a valid request.
        """
        from dashinfer_vlm_core.protocol import ChatRequest

        try:
            body = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            raise InvalidParameter(f"{path} is not a saved conversation: it is not valid JSON.") from None
        ChatRequest.parse(body)
        options = {name: value for name, value in body.items() if name not in RESERVED_FIELDS}
        return cls(messages=list(body["messages"]), options=options)

    def _remove_after_prompt(self, offset: int) -> bool:
        for index in reversed(range(len(self.messages))):
            if self.messages[index]["role"] == "user":
                del self.messages[index + offset :]
                return True
        return False


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    return f"Did you mean {' or '.join(f'`{one}`' for one in close)}?" if close else f"Fields: {', '.join(known)}."


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
