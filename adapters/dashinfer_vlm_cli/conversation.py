"""What was said: messages, pictures that wait for their question, and options of the requests. No input and output."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dashinfer_vlm_core.errors import InvalidParameter

from .media import Part

Message = dict[str, Any]

NO_OPTIONS = frozenset(
    {"messages", "model", "n", "stream", "stream_options", "tools", "tool_choice", "parallel_tool_calls", "logprobs",
     "top_logprobs"}
)  # fmt: skip
"""Fields of a request that are not for a person in a conversation to set."""


@dataclass(kw_only=True, slots=True)
class Conversation:
    """A conversation with a model.

    Attributes:
        messages: what was said so far, as OpenAI's JSON.
        options: fields of the requests, such as `temperature`.
        waiting: pictures and videos that go with the next question.
    """

    messages: list[Message] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    waiting: list[Part] = field(default_factory=list)

    @property
    def request(self) -> Mapping[str, Any]:
        return {**self.options, "messages": self.messages}

    @property
    def turns(self) -> int:
        return sum(message["role"] == "user" for message in self.messages)

    @property
    def system(self) -> str:
        """How the model was told to behave; empty if it was not."""
        return str(self.messages[0]["content"]) if self.messages and self.messages[0]["role"] == "system" else ""

    def set_system(self, system: str) -> None:
        """Say how the model is to behave, from the next answer on; an empty text takes that back."""
        said = [message for message in self.messages if message["role"] != "system"]
        self.messages = [*([{"role": "system", "content": system}] if system else []), *said]

    def attach(self, part: Part) -> None:
        self.waiting.append(part)

    def add_user(self, text: str) -> None:
        """Ask: what waits goes before the text."""
        content = [*self.waiting, {"type": "text", "text": text}] if self.waiting else text
        self.messages.append({"role": "user", "content": content})
        self.waiting = []

    def add_assistant(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def undo(self) -> bool:
        """Drop the last question and its answer; False if there is none."""
        asked = self._last_question()
        if asked is None:
            return False
        del self.messages[asked:]
        return True

    def retry(self) -> bool:
        """Drop the last answer, so that its question is the last that was said; False if there is none."""
        asked = self._last_question()
        if asked is None:
            return False
        del self.messages[asked + 1 :]
        return True

    def reset(self) -> None:
        """Forget what was said; how the model is to behave, and the options, stay."""
        self.messages = [message for message in self.messages if message["role"] == "system"]
        self.waiting = []

    def set(self, name: str, text: str) -> object:
        """Set an option of the requests from what was typed: JSON, or text; nothing unsets it. The value.

        Raises:
            RequestError: there is no such option, or it cannot have this value; in the words of the engine.
        """
        from dashinfer_vlm_core.protocol import ChatRequest
        from dashinfer_vlm_core.structured_output.output_grammar import grammar_for_request

        known = sorted(set(ChatRequest.model_fields) - NO_OPTIONS)
        if name not in known:
            raise InvalidParameter(f"There is no option `{name}`. {_nearest(name, known)}", param=name)
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
        """Write the conversation, with its pictures, as the body of a request.

        Raises:
            OSError: it cannot be written.
        """
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(json.dumps(self.request, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Conversation:
        """A conversation that was saved, or the body of any other request.

        Raises:
            OSError: it cannot be read.
            RequestError: it is no request; the message says why.
        """
        from dashinfer_vlm_core.protocol import ChatRequest

        try:
            body = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            raise InvalidParameter(f"{path} is no saved conversation: it holds no JSON.") from None
        ChatRequest.parse(body)
        options = {name: value for name, value in body.items() if name not in NO_OPTIONS}
        return cls(messages=list(body["messages"]), options=options)

    def _last_question(self) -> int | None:
        places = (index for index, message in enumerate(self.messages) if message["role"] == "user")
        return max(places, default=None)


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    return f"Did you mean {' or '.join(f'`{one}`' for one in close)}?" if close else f"There is: {', '.join(known)}."


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
