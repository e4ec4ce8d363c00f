"""Items of the Responses API, and their conversion to messages of a chat request."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import ConfigDict, Field, model_validator

from .base import Array, Name, RequestModel, StringOrArray, Text
from .converted import ConvertedMessage
from .field_names import MISPLACED, UnknownMedia
from .fields import NO_AUDIO, RETURNED_FIELDS
from .messages import MAX_PARTS
from .sources import PruningRate
from .validation_errors import field_error, invalid, show, unsupported

REFERENCE = "item_reference"

FILE_FIELDS = ("file_data", "file_url", "filename", "pages", "render", "dpi", "max_pixels", "password")
"""Fields of a part with a file, which are fields of `file` in chat requests."""

_SUMMARY_MARK = "summary."
"""What the content of compaction items begins with, which clients should treat as opaque."""


_UNKNOWN_MEDIA = UnknownMedia(
    image='{"type": "input_image", "image_url": "data:image/png;base64,..."}',
    video='{"type": "input_video", "video_url": "data:video/mp4;base64,..."}',
    document='{"type": "input_file", "file_data": "data:application/pdf;base64,..."}',
)


class _StoredModel(RequestModel):
    """Base class of what is stored with a response: unknown keys are dropped, rather than kept in memory."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore")


class ItemPart(_StoredModel):
    """A content part of an item: text, an image, a video or a document. The chat request that it becomes checks it."""

    _accepted_fields: ClassVar[Collection[str]] = RETURNED_FIELDS | {"input_audio"}
    _unknown_media: ClassVar[UnknownMedia | None] = replace(_UNKNOWN_MEDIA, by_value=True)

    type: Text
    text: Text | None = None
    refusal: Text | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None
    image_url: Any = None
    video_url: Any = None
    pruning_rate: PruningRate | None = None
    file_data: Text | None = None
    file_url: Text | None = None
    filename: Text | None = None
    file_id: Any = None
    pages: Any = None
    render: Any = None
    dpi: Any = None
    max_pixels: Any = None
    password: Any = Field(default=None, repr=False)
    uuid: Any = None

    @model_validator(mode="after")
    def _check_pruning(self) -> ItemPart:
        if self.pruning_rate is not None and self.type not in _PRUNED_TYPES:
            raise field_error("pruning_rate", MISPLACED["pruning_rate"])
        for source in (self.image_url, self.video_url):
            if self.pruning_rate is not None and isinstance(source, Mapping) and "pruning_rate" in source:
                raise field_error("pruning_rate", "is set twice, next to the URL and in its object. Remove one.")
        return self

    def to_chat(self, path: str) -> dict[str, Any]:
        """Return the content part of a chat request.

        Raises:
            InvalidParameter: the type is unknown.
            UnsupportedParameter: the type or a source is not supported.
        """
        if self.file_id is not None:
            raise unsupported(
                f"{path}.file_id",
                "is not supported: files are not stored. Send images as `image_url`, videos as `video_url`, and"
                " documents as `file_data` or `file_url`.",
            )
        if self.type == "input_audio":
            raise unsupported(f"{path}.type", f"is 'input_audio'. {NO_AUDIO}")
        if self.type not in _CHAT_TYPES:
            raise invalid(f"{path}.type", f"must be one of {', '.join(_CHAT_TYPES)}; got {show(self.type)}.")
        values = {
            "text": self.text,
            "refusal": self.refusal,
            "image_url": self._source(self.image_url, detail=self._detail, pruning_rate=self.pruning_rate),
            "video_url": self._source(self.video_url, pruning_rate=self.pruning_rate),
            "file": {"detail": self._detail} | {name: getattr(self, name) for name in FILE_FIELDS},
        }
        chat_type = _CHAT_TYPES[self.type]
        return {"type": chat_type, chat_type: values[chat_type], "uuid": self.uuid}

    def _source(self, given: Any, **options: object) -> Any:
        # A URL, or, as in chat requests, an object with a URL and options.
        options = {name: value for name, value in options.items() if value is not None}
        source = {"url": given} if options and (given is None or isinstance(given, str)) else given
        return options | source if isinstance(source, dict) else source

    @property
    def _detail(self) -> str | None:
        return "high" if self.detail == "original" else self.detail

    @property
    def is_text(self) -> bool:
        return self.type in _TEXT_TYPES


_PRUNED_TYPES = ("input_image", "input_video")
_TEXT_TYPES = ("input_text", "output_text", "text")
_CHAT_TYPES: Mapping[str, str] = {
    **dict.fromkeys(_TEXT_TYPES, "text"),
    "input_image": "image_url",
    "input_video": "video_url",
    "input_file": "file",
    "refusal": "refusal",
}
"""Types of content parts in chat requests, each also the name of the field with the value."""

_Parts: TypeAlias = Annotated[Array[ItemPart], Field(max_length=MAX_PARTS)]
_Content: TypeAlias = StringOrArray[Text, _Parts]


class InputItem(_StoredModel):
    """An item of the input; `type` says which of the fields it has.

    Output items of earlier responses are valid, too. Their `id`, `status`, `phase` and a reasoning item's
    `encrypted_content` have no effect.
    """

    _unknown_media: ClassVar[UnknownMedia | None] = _UNKNOWN_MEDIA

    type: Text = "message"
    id: Text | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: _Content | None = None
    summary: _Parts = ()
    call_id: Name | None = None
    name: Name | None = None
    arguments: Text | None = None
    output: _Content | None = None
    encrypted_content: Text | None = None

    @property
    def is_reference(self) -> bool:
        """Whether it stands for the stored item with its `id`; the type of a reference may be omitted."""
        return self.type == REFERENCE or self.model_fields_set == {"id"}


class ItemConverter:
    """Converts items to messages of a chat request.

    Reasoning, a message of the assistant and tool calls that follow each other become one message, as chat templates
    expect.

    Attributes:
        messages: the messages so far.
    """

    def __init__(self) -> None:
        self.messages: list[ConvertedMessage] = []
        self._call_ids: set[str] = set()

    def add_instructions(self, text: str) -> None:
        self.messages.append(ConvertedMessage({"role": "system", "content": text}, [("", "instructions")]))

    def add(self, item: InputItem, path: str) -> None:
        """Add an item.

        Args:
            item: the item.
            path: where the request has it, such as `input[0]`.

        Raises:
            InvalidParameter: a field that its type requires is missing, or it is the result of an unknown call.
            UnsupportedParameter: its type is not supported.
        """
        add = _ITEM_CONVERTERS.get(item.type)
        if add is None:
            raise unsupported(f"{path}.type", f"must be one of {', '.join(_ITEM_CONVERTERS)}; got {show(item.type)}.")
        add(self, item, path)

    def add_message(self, item: InputItem, path: str) -> None:
        role = _required(item, "role", path)
        content = _content(item.content, f"{path}.content", join=role != "user")
        if role == "assistant" and (last := self._last_with(reasoning_only=True)):
            last.body["content"] = content
            last.sources.insert(0, (".content", f"{path}.content"))
            return
        self.messages.append(ConvertedMessage({"role": role, "content": content}, [("", path)]))

    def add_reasoning(self, item: InputItem, path: str) -> None:
        parts = item.content if isinstance(item.content, tuple) and item.content else item.summary
        text = item.content if isinstance(item.content, str) else "\n\n".join(part.text or "" for part in parts)
        if not text:  # encrypted by another provider
            return
        if last := self._last_with(reasoning_only=True):
            last.body["reasoning_content"] += f"\n\n{text}"
            return
        body = {"role": "assistant", "content": "", "reasoning_content": text}
        self.messages.append(ConvertedMessage(body, [(".reasoning_content", f"{path}.content"), ("", path)]))

    def add_call(self, item: InputItem, path: str) -> None:
        call_id = _required(item, "call_id", path)
        function = {"name": _required(item, "name", path), "arguments": _required(item, "arguments", path)}
        if (last := self._last_with(reasoning_only=False)) is None:
            last = ConvertedMessage({"role": "assistant"}, [("", path)])
            self.messages.append(last)
        calls = last.body.setdefault("tool_calls", [])
        last.sources.insert(0, (f".tool_calls[{len(calls)}].function", path))
        calls.append({"id": call_id, "type": "function", "function": function})
        self._call_ids.add(call_id)

    def add_output(self, item: InputItem, path: str) -> None:
        call_id = _required(item, "call_id", path)
        if call_id not in self._call_ids:
            raise invalid(
                f"{path}.call_id",
                f"is {show(call_id)}, but no earlier tool call has this ID. Send the `function_call` item too, or the"
                " `previous_response_id` of the response that contains it.",
            )
        content = _content(item.output, f"{path}.output", join=False)
        body = {"role": "tool", "tool_call_id": call_id, "content": content}
        self.messages.append(ConvertedMessage(body, [(".content", f"{path}.output"), ("", path)]))

    def add_compaction(self, item: InputItem, path: str) -> None:
        summary = _decode_summary(_required(item, "encrypted_content", path))
        if summary is None:
            raise invalid(
                f"{path}.encrypted_content",
                "is not a summary that this API created. Send the items of the conversation.",
            )
        content = f"Summary of the earlier conversation:\n{summary}"
        self.messages.append(ConvertedMessage({"role": "system", "content": content}, [("", path)]))

    def _last_with(self, *, reasoning_only: bool) -> ConvertedMessage | None:
        """Return the last message if it is the assistant's, and if required, has reasoning and nothing else yet."""
        last = self.messages[-1] if self.messages else None
        if last is None or last.body["role"] != "assistant":
            return None
        has_other = last.body.get("content") or "tool_calls" in last.body or "reasoning_content" not in last.body
        return None if reasoning_only and has_other else last


_ITEM_CONVERTERS: Mapping[str, Callable[[ItemConverter, InputItem, str], None]] = {
    "message": ItemConverter.add_message,
    "function_call": ItemConverter.add_call,
    "function_call_output": ItemConverter.add_output,
    "reasoning": ItemConverter.add_reasoning,
    "compaction": ItemConverter.add_compaction,
}


def encode_summary(summary: str) -> str:
    """Return the `encrypted_content` of a compaction item. It is encoded only: its client may know the summary."""
    return _SUMMARY_MARK + base64.urlsafe_b64encode(summary.encode()).decode()


def _decode_summary(content: str) -> str | None:
    if not content.startswith(_SUMMARY_MARK):
        return None
    try:
        return base64.b64decode(content.removeprefix(_SUMMARY_MARK), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def _content(content: str | tuple[ItemPart, ...] | None, path: str, *, join: bool) -> str | list[dict[str, Any]]:
    """Convert the content of an item; with `join`, text becomes one string, as chat templates expect of most roles."""
    if content is None:
        raise invalid(path, "is required. Pass a string or an array of parts.")
    if isinstance(content, str):
        return content
    if join and all(part.is_text for part in content):
        return "".join(_texts(content, path))
    return [part.to_chat(f"{path}[{index}]") for index, part in enumerate(content)]


def _texts(parts: Iterable[ItemPart], path: str) -> Iterator[str]:
    for index, part in enumerate(parts):
        if part.text is None:
            raise invalid(f"{path}[{index}].text", "is required.")
        yield part.text


def _required(item: InputItem, name: str, path: str) -> Any:
    value = getattr(item, name)
    if value is None:
        raise invalid(f"{path}.{name}", f"is required in items of the type {item.type!r}.")
    return value
