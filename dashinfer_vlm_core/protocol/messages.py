"""Messages and their content parts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from .base import Array, Label, Name, RequestModel, StringOrArray, StringOrObject, Text
from .document_part import DocumentPart
from .field_names import UnknownMedia
from .fields import REJECTED_IN_MESSAGES, REJECTED_PARTS, RETURNED_FIELDS
from .json_limits import MAX_CHARACTERS, MAX_VALUES, TOO_MANY_VALUES, JsonLimitExceeded, count_values
from .media_part import MediaPart
from .sources import FileSource, ImageEmbeds, ImageURL, InputVideo, MediaSource, VideoURL
from .validation_errors import invalid, show, unsupported

MAX_PARTS = 1024
MAX_TOOL_CALLS = 128

UNKNOWN_MEDIA = UnknownMedia(
    image='{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}',
    video='{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,..."}}',
    document='{"type": "file", "file": {"file_data": "data:application/pdf;base64,..."}}',
)

_SOURCES: Mapping[str, type[MediaSource]] = {
    "image_url": ImageURL,
    "video_url": VideoURL,
    "input_video": InputVideo,
    "image_embeds": ImageEmbeds,
    "file": FileSource,
}
_ROLES = ("user", "assistant", "system", "developer", "tool")
_PART_TYPES: Mapping[str, tuple[str, ...]] = {
    "text": _ROLES,
    **dict.fromkeys(_SOURCES, ("user", "tool")),
    "refusal": ("assistant",),
}
"""Types of content parts, and the roles whose messages can contain them."""


class Part(RequestModel):
    """A content part; `type` names the field that holds its value.

    An image or video that was sent before under its `uuid` can be omitted.
    """

    _accepted_fields: ClassVar[Collection[str]] = RETURNED_FIELDS | REJECTED_PARTS.keys()
    _unknown_media: ClassVar[UnknownMedia | None] = replace(UNKNOWN_MEDIA, by_value=True)

    type: Text
    text: Text | None = None
    image_url: StringOrObject[Text, ImageURL] | None = None
    video_url: StringOrObject[Text, VideoURL] | None = None
    input_video: InputVideo | None = None
    image_embeds: StringOrObject[Text, ImageEmbeds] | None = None
    file: FileSource | None = None
    uuid: Label | None = None
    refusal: Text | None = None

    def check(self, role: str, path: str) -> None:
        if self.type in REJECTED_PARTS:
            raise unsupported(f"{path}.type", f"is {show(self.type)}. {REJECTED_PARTS[self.type]}")
        if self.type not in _PART_TYPES:
            raise invalid(f"{path}.type", f"must be one of {', '.join(_PART_TYPES)}; got {show(self.type)}.")
        if role not in _PART_TYPES[self.type]:
            raise invalid(
                path,
                f"has the type {self.type}, which messages with the role {role!r} cannot contain."
                f" Use the role {_PART_TYPES[self.type][0]!r}.",
            )
        if self.type == "input_video" and self.input_video is not None and self.video_url is not None:
            raise invalid(f"{path}.video_url", f"and `{path}.input_video` cannot be combined. Pass one of them.")
        self._check_value(path)

    def _check_value(self, path: str) -> None:
        is_media = self.type in _SOURCES
        has_uuid = is_media and self.uuid is not None
        value_path = f"{path}.{self._value_field}"
        if self._value is None and not has_uuid:
            raise invalid(value_path, "is required.")
        if is_media:
            self._source.check(value_path, f"{path}.{self._content_field}", optional=has_uuid)

    @property
    def _value_field(self) -> str:
        """The field with the value: the one that `type` names, but clients also send `input_video` as `video_url`."""
        return "video_url" if self.type == "input_video" and self.video_url is not None else self.type

    @property
    def _value(self) -> str | MediaSource | None:
        value: str | MediaSource | None = getattr(self, self._value_field)
        return value

    @property
    def _source(self) -> MediaSource:
        value = self._value
        return value if isinstance(value, MediaSource) else _SOURCES[self._value_field].from_string(value)

    @property
    def _content_field(self) -> str:
        is_string = isinstance(self._value, str)
        return self._value_field if is_string else f"{self._value_field}.{self._source.content_field}"

    def media(self, path: str) -> Sequence[MediaPart]:
        """Return the image or video of this part, or the images of a document's pages."""
        media = self._source.media(path, self._content_field, self.uuid) if self.type in _SOURCES else None
        return [media] if media else []

    def document(self, path: str) -> DocumentPart | None:
        return self._source.document(path, self._content_field) if self.type in _SOURCES else None

    def for_template(self) -> list[dict[str, Any]]:
        if self.type in _SOURCES:
            return [{"type": self._source.kind}]
        return [{"type": "text", "text": self._value}]


class ReadDocument(Part):
    """The content part of a document that was read.

    Attributes:
        contents: the texts and images of its pages, in order.
    """

    contents: tuple[str | MediaPart, ...]

    def media(self, path: str) -> Sequence[MediaPart]:
        return [content for content in self.contents if isinstance(content, MediaPart)]

    def document(self, path: str) -> None:
        return None

    def for_template(self) -> list[dict[str, Any]]:
        return [
            {"type": "text", "text": content} if isinstance(content, str) else {"type": content.kind}
            for content in self.contents
        ]


class Function(RequestModel):
    name: Name
    arguments: Text


class ToolCall(RequestModel):
    """A tool call that the assistant made earlier in the conversation."""

    id: Name
    type: Literal["function"] = "function"
    function: Function

    def for_template(self) -> dict[str, Any]:
        return self.model_dump(include={"id": True, "type": True, "function": {"name", "arguments"}})


class Message(RequestModel):
    """A message. `content` is optional for assistant messages with tool calls, reasoning or a refusal."""

    _accepted_fields: ClassVar[Collection[str]] = RETURNED_FIELDS | REJECTED_IN_MESSAGES.keys()
    _unknown_media: ClassVar[UnknownMedia | None] = UNKNOWN_MEDIA

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StringOrArray[Text, Annotated[Array[Part], Field(min_length=1, max_length=MAX_PARTS)]] | None = None
    name: Name | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[Array[ToolCall], Field(max_length=MAX_TOOL_CALLS)] = ()
    tool_call_id: Name | None = None

    def check(self, path: str) -> None:
        for name, next_step in REJECTED_IN_MESSAGES.items():
            if name in (self.model_extra or {}):
                raise unsupported(f"{path}.{name}", f"is not supported. {next_step}")
        for name in ("tool_calls", "refusal", "reasoning_content"):
            if self.role != "assistant" and getattr(self, name):
                raise invalid(f"{path}.{name}", "is allowed in messages of the assistant only.")
        if self.content is None and not (self.tool_calls or self.reasoning_content) and self.refusal is None:
            raise invalid(f"{path}.content", "is required. Pass a string or an array of parts.")
        for part_path, part in self.parts(path):
            part.check(self.role, part_path)

    def parts(self, path: str) -> list[tuple[str, Part]]:
        """Return the content parts, each with its path in the request; none if the content is a string."""
        parts = self.content if isinstance(self.content, tuple) else ()
        return [(f"{path}.content[{index}]", part) for index, part in enumerate(parts)]

    def with_documents(self, path: str, contents: Mapping[str, tuple[str | MediaPart, ...]]) -> Message:
        """Return the message with the contents of documents, given by their paths, in place of these."""
        parts = [
            ReadDocument(type=part.type, contents=contents[part_path]) if part_path in contents else part
            for part_path, part in self.parts(path)
        ]
        return self.model_copy(update={"content": tuple(parts)}) if parts else self

    def for_template(self) -> dict[str, Any]:
        content: str | list[dict[str, Any]]
        if isinstance(self.content, tuple):
            content = [item for part in self.content for item in part.for_template()]
        else:
            content = (self.refusal or "") if self.content is None else self.content
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        optional = {
            "name": self.name,
            "reasoning_content": self.reasoning_content,
            "tool_calls": [call.for_template() for call in self.tool_calls],
            "tool_call_id": self.tool_call_id,
        }
        return message | {key: value for key, value in optional.items() if value}


def check_tool_arguments(messages: Iterable[Message]) -> None:
    """Check the arguments of all tool calls, whose JSON text is parsed for the chat template.

    Raises:
        InvalidParameter: they are nested too deeply, or together would take far more memory than their text.
    """
    characters = values = 0
    for index, message in enumerate(messages):
        for number, call in enumerate(message.tool_calls):
            arguments = call.function.arguments
            characters += len(arguments)
            try:
                if characters > MAX_CHARACTERS:
                    raise JsonLimitExceeded(f"exceeds {MAX_CHARACTERS} characters, with all earlier calls. Send fewer.")
                values += count_values(arguments)
                if values > MAX_VALUES:
                    raise JsonLimitExceeded(TOO_MANY_VALUES.replace(" values", " values, with all earlier calls"))
            except JsonLimitExceeded as error:
                raise invalid(f"messages[{index}].tool_calls[{number}].function.arguments", str(error)) from None
