"""The request: OpenAI's chat completion, checked whole before anything else happens.

    parse:  known fields that cannot be honoured -> shape (pydantic) -> sense (what one field says about another)

Unknown keys are tolerated at every level, `null` means absent, numbers are finite and never booleans or strings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Strict,
    Tag,
    ValidationError,
    model_validator,
)
from typing_extensions import Self

from .errors import InvalidParameter, RequestError, UnsupportedParameter
from .sampling import Sampling

DEFAULT_MAX_TOKENS = 4096
"""Most tokens of an answer whose request names no limit; the engine takes less where the context leaves less."""

LOW_DETAIL_PIXELS = 256 * 28 * 28
"""Most pixels of a picture sent with `detail: "low"`: those of 256 visual tokens of 28 x 28 pixels."""

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_FRAMES = 4096
MAX_STOP_CHARACTERS = 256
MAX_LISTED_TOKENS = 1024
LARGEST = 2**31 - 1
GREEDY_BELOW = 1e-5

HONOURED = frozenset(
    {
        "messages", "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "top_p",
        "frequency_penalty", "presence_penalty", "stop", "seed", "logprobs", "top_logprobs", "logit_bias",
    }
)  # fmt: skip
"""OpenAI's fields that shape the answer here as they do there."""

NO_EFFECT = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
)
"""OpenAI's fields that by their definition do not change the answer: labels, and hints to a cache."""

_NO_TOOLS = "This engine calls no tools yet: leave it out, and describe in the prompt what you need."
_NO_AUDIO = "These models neither hear nor speak: leave it out."
_NO_GRAMMAR = "Answers are free text: leave it out, and ask for the format in the prompt."
_NO_TEMPLATE = "The chat template belongs to the server: leave it out."

REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = MappingProxyType(
    {
        # OpenAI's. Each field: values that ask for nothing and are accepted, and the next step for all others.
        "audio": ((), _NO_AUDIO),
        "function_call": (("none",), _NO_TOOLS),
        "functions": (([],), _NO_TOOLS),
        "modalities": ((["text"],), _NO_AUDIO),
        "moderation": ((), "Nothing is moderated here: leave it out."),
        "n": ((1,), "One answer is given per request: leave it out, and send the request several times."),
        "parallel_tool_calls": ((), _NO_TOOLS),
        "prediction": ((), "Predicted output is not used here: leave it out."),
        "reasoning_effort": (("none",), "These models do not reason before they answer: leave it out."),
        "response_format": (({"type": "text"},), _NO_GRAMMAR),
        "service_tier": (("auto", "default"), 'There is one tier: leave it out, or write "auto".'),
        "store": ((False,), "Answers are not stored here: leave it out."),
        "tool_choice": (("none",), _NO_TOOLS),
        "tools": (([],), _NO_TOOLS),
        "verbosity": (("medium",), "Length is not steered here: leave it out, and ask for it in the prompt."),
        "web_search_options": ((), "Nothing is searched here: leave it out."),
        # Of other engines' servers: they would change the answer, so that ignoring them would deceive.
        "add_generation_prompt": ((True,), _NO_TEMPLATE),
        "bad_words": (([],), "Leave it out, and use `logit_bias` on the tokens."),
        "best_of": ((1,), "One answer is decoded per request: leave it out."),
        "chat_template": ((), _NO_TEMPLATE),
        "chat_template_kwargs": (({},), _NO_TEMPLATE),
        "continue_final_message": ((False,), _NO_TEMPLATE),
        "echo": ((False,), "The prompt is not repeated in the answer: leave it out."),
        "guided_choice": ((), _NO_GRAMMAR),
        "guided_grammar": ((), _NO_GRAMMAR),
        "guided_json": ((), _NO_GRAMMAR),
        "guided_regex": ((), _NO_GRAMMAR),
        "include_stop_str_in_output": ((False,), "The text ends before the stop string: leave it out."),
        "length_penalty": ((1, 1.0), "It belongs to beam search, which is not done here: leave it out."),
        "min_p": ((0, 0.0), "Leave it out, and use `top_p` or `top_k`."),
        "prompt_logprobs": ((), "Only the answer has log probabilities: leave it out, and use `logprobs`."),
        "skip_special_tokens": ((True,), "Special tokens are never shown: leave it out."),
        "structured_outputs": ((), _NO_GRAMMAR),
        "use_beam_search": ((False,), "Leave it out: tokens are sampled, or the likeliest is taken at temperature 0."),
    }
)
"""Known fields that cannot be honoured: refused by name unless their value asks for nothing."""

REFUSED_PARTS: Mapping[str, str] = MappingProxyType(
    {
        "input_audio": _NO_AUDIO,
        "audio_url": _NO_AUDIO,
        "file": "Files are not read: send pictures as `image_url` parts and text as `text` parts.",
    }
)

REFUSED_IN_MESSAGES: Mapping[str, str] = MappingProxyType(
    {"audio": _NO_AUDIO, "function_call": "It is outdated: write `tool_calls`."}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaPart:
    """One picture or video that a message refers to, not fetched yet.

    Attributes:
        kind: what the part says it is.
        part: where it stands in the request, such as `messages[0].content[1]`.
        url: where to get it (`data:`, `http:`, `https:` or `file:`, unchecked); for a video also a tuple: its frames, in order,
            each the URL of a picture.
        min_pixels: least pixels (of each frame) after resizing, at least 1.
        max_pixels: most pixels (of each frame) after resizing, at least `min_pixels`.
        total_pixels: most pixels of all frames of a video together.
        fps: frames per second to sample from a video file, or at which a list of frames was taken; above 0.
        num_frames: frames to sample from a video file, instead of `fps`.
    """

    kind: Literal["image", "video"]
    part: str
    url: str | tuple[str, ...]
    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None
    fps: float | None = None
    num_frames: int | None = None


def _encodable(text: str) -> str:
    """Text that JSON could spell but no tokenizer can read: half of a surrogate pair."""
    if not text.isascii():  # known without a look at the text, so that megabytes of base64 cost nothing
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("must be valid Unicode, without lone surrogates") from None
    return text


def _string_or_array(value: object) -> str | None:
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, (list, tuple)) else None


def _string_or_object(value: object) -> str | None:
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, (dict, BaseModel)) else None


_TAGS = frozenset({"string", "array", "object"})

_Text: TypeAlias = Annotated[str, AfterValidator(_encodable)]
_Name: TypeAlias = Annotated[_Text, Field(min_length=1, max_length=256)]
_Pixels: TypeAlias = Annotated[int, Field(ge=1, le=LARGEST)]
_Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2)]
_TokenId: TypeAlias = Annotated[int, Field(ge=0, le=LARGEST)]
_TokenKey: TypeAlias = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
_Bias: TypeAlias = Annotated[float, Field(ge=-100, le=100)]
_Stop: TypeAlias = Annotated[_Text, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class _Open(BaseModel):
    """Base of every object in a request: unknown keys are kept, nulls are absent, nothing is converted."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: object) -> object:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class _Sized(_Open):
    """Bounds on the size of a picture or frame; DashInfer-VLM's spelling has no `s`."""

    min_pixels: _Pixels | None = None
    max_pixels: _Pixels | None = None
    min_pixel: _Pixels | None = None
    max_pixel: _Pixels | None = None

    @property
    def least(self) -> int | None:
        return self.min_pixels or self.min_pixel

    @property
    def most(self) -> int | None:
        return self.max_pixels or self.max_pixel


class ImageURL(_Sized):
    """A picture's source.

    `detail` is honoured as a bound on the picture's size, unless the request gives `max_pixels` itself: "low" takes at most
    `LOW_DETAIL_PIXELS`, "auto" and "high" what the server allows.
    """

    url: _Text
    detail: Literal["auto", "low", "high"] = "auto"

    @property
    def most(self) -> int | None:
        if self.detail == "low" and super().most is None:
            return max(LOW_DETAIL_PIXELS, self.least or 0)
        return super().most


class Frame(_Open):
    """One frame of a video that is given as a list: `{"url": ...}`, or a whole `image_url` part."""

    url: _Text | None = None
    image_url: ImageURL | None = None


_Frame: TypeAlias = Annotated[
    Annotated[_Text, Tag("string")] | Annotated[Frame, Tag("object")], Discriminator(_string_or_object)
]
_Frames: TypeAlias = Annotated[
    tuple[_Frame, ...], Strict(False), Field(min_length=1, max_length=MAX_FRAMES, fail_fast=True)
]


class VideoURL(_Sized):
    """A video's source: a file, or its frames in order."""

    url: Annotated[
        Annotated[_Text, Tag("string")] | Annotated[_Frames, Tag("array")], Discriminator(_string_or_array)
    ]
    fps: Annotated[float, Field(gt=0, le=1000)] | None = None
    num_frames: Annotated[int, Field(ge=1, le=LARGEST)] | None = None
    total_pixels: _Pixels | None = None


class Part(_Open):
    """One part of a message's content; the field named by `type` holds it."""

    type: _Text
    text: _Text | None = None
    refusal: _Text | None = None
    image_url: ImageURL | None = None
    video_url: VideoURL | None = None


class Function(_Open):
    name: _Name
    arguments: _Text


class ToolCall(_Open):
    """A call that the assistant made earlier in the conversation."""

    id: _Name
    type: Literal["function"] = "function"
    function: Function


_Parts: TypeAlias = Annotated[
    tuple[Part, ...], Strict(False), Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)
]
_Content: TypeAlias = Annotated[
    Annotated[_Text, Tag("string")] | Annotated[_Parts, Tag("array")], Discriminator(_string_or_array)
]
_StopList: TypeAlias = Annotated[tuple[_Stop, ...], Strict(False), Field(min_length=1, max_length=4, fail_fast=True)]


class Message(_Open):
    """One message; `content` may be missing where an assistant called tools or refused."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content | None = None
    name: _Name | None = None
    refusal: _Text | None = None
    tool_call_id: _Name | None = None
    tool_calls: Annotated[tuple[ToolCall, ...], Strict(False), Field(max_length=MAX_PARTS, fail_fast=True)] = ()

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it; a developer speaks as the system."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        if isinstance(self.content, tuple):
            message["content"] = [_part_for_template(part) for part in self.content]
        else:
            message["content"] = self.refusal or "" if self.content is None else self.content
        if self.name:
            message["name"] = self.name
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return message


class StreamOptions(_Open):
    include_usage: bool = False
    include_obfuscation: bool = False


class ChatRequest(_Open):
    """A chat completion request that was checked whole.

    Besides OpenAI's fields it has those that engines share: `top_k`, `repetition_penalty`, `min_tokens`, `ignore_eos` and
    `stop_token_ids`.
    """

    messages: Annotated[
        tuple[Message, ...], Strict(False), Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    model: _Name = "model"
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=LARGEST)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=LARGEST)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=LARGEST)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=LARGEST)] = 0
    frequency_penalty: _Penalty = 0.0
    presence_penalty: _Penalty = 0.0
    # Far below 1 it would overflow single precision when logits are divided by it.
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    logit_bias: Annotated[dict[_TokenKey, _Bias], Field(max_length=MAX_LISTED_TOKENS)] = Field(default_factory=dict)
    stop: (
        Annotated[Annotated[_Stop, Tag("string")] | Annotated[_StopList, Tag("array")], Discriminator(_string_or_array)]
        | None
    ) = None
    stop_token_ids: Annotated[
        tuple[_TokenId, ...], Strict(False), Field(max_length=MAX_LISTED_TOKENS, fail_fast=True)
    ] = ()
    ignore_eos: bool = False
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @classmethod
    def parse(cls, data: object) -> ChatRequest:
        """Check a request that came as JSON.

        Raises:
            InvalidParameter: a value has the wrong type, range or shape; `param` is the deepest field to blame, in OpenAI's
                notation, such as `messages[1].content[0].image_url.url`.
            UnsupportedParameter: a known field asks for what is not done here.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise _explain(error) from None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: object) -> object:
        for name in REFUSED.keys() & data.keys() if isinstance(data, dict) else ():
            neutral, advice = REFUSED[name]
            value = data[name]
            if value is not None and not any(type(value) is type(other) and value == other for other in neutral):
                raise UnsupportedParameter(f"`{name}` {_show(value)} is not supported. {advice}", param=name)
        return data

    @model_validator(mode="after")
    def _check_sense(self) -> Self:
        for index, message in enumerate(self.messages):
            _check_message(message, f"messages[{index}]")
        _check_options(self)
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that holds the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end the answer and are not part of it."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()

    def media(self) -> tuple[MediaPart, ...]:
        """Every picture and video, in the order of the prompt."""
        return tuple(
            _media_part(part, f"messages[{i}].content[{j}]")
            for i, message in enumerate(self.messages)
            if isinstance(message.content, tuple)
            for j, part in enumerate(message.content)
            if part.type in _MEDIA
        )

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as chat templates expect them.

        Each has `role` (a developer speaks as the system) and `content`: a string, or a list of `{"type": "text", "text": ...}`,
        `{"type": "image"}` and `{"type": "video"}`. `name`, `tool_calls` and `tool_call_id` are kept. Text is as the user wrote it:
        nothing in it is trusted.
        """
        return [message.for_template() for message in self.messages]

    def sampling(self) -> Sampling:
        """How to choose the answer's tokens; `max_tokens` is None where the request names no limit.

        A temperature below 1e-5 counts as 0: it could choose no other token, but would overflow single precision.
        """
        return Sampling(
            max_tokens=self.max_completion_tokens or self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature if self.temperature >= GREEDY_BELOW else 0.0,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=MappingProxyType({int(token): bias for token, bias in self.logit_bias.items()}),
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


_MEDIA = frozenset({"image_url", "video_url"})
_PART_TYPES = ("text", "image_url", "video_url", "refusal")


def _part_for_template(part: Part) -> dict[str, str]:
    if part.type in _MEDIA:
        return {"type": part.type.removesuffix("_url")}
    return {"type": "text", "text": part.text if part.type == "text" and part.text is not None else part.refusal or ""}


def _media_part(part: Part, where: str) -> MediaPart:
    if part.type == "image_url":
        image = part.image_url
        assert image is not None
        return MediaPart(kind="image", part=where, url=image.url, min_pixels=image.least, max_pixels=image.most)
    video = part.video_url
    assert video is not None
    return MediaPart(
        kind="video",
        part=where,
        url=video.url if isinstance(video.url, str) else tuple(_frame_url(frame) for frame in video.url),
        min_pixels=video.least,
        max_pixels=video.most,
        total_pixels=video.total_pixels,
        fps=video.fps,
        num_frames=video.num_frames,
    )


def _frame_url(frame: str | Frame) -> str:
    if isinstance(frame, str):
        return frame
    return frame.image_url.url if frame.image_url else frame.url or ""


# What one field says about another


def _check_message(message: Message, where: str) -> None:
    for name, advice in REFUSED_IN_MESSAGES.items():
        if name in (message.model_extra or {}):
            raise UnsupportedParameter(f"`{where}.{name}` is not supported. {advice}", param=f"{where}.{name}")
    if message.role != "assistant" and (message.tool_calls or message.refusal is not None):
        field = "tool_calls" if message.tool_calls else "refusal"
        raise InvalidParameter(f"`{where}.{field}` belongs in messages of the assistant only.", param=f"{where}.{field}")
    if message.content is None and not message.tool_calls and message.refusal is None:
        raise InvalidParameter(f"`{where}.content` is required: a string, or an array of parts.", param=f"{where}.content")
    if isinstance(message.content, tuple):
        for index, part in enumerate(message.content):
            _check_part(part, message.role, f"{where}.content[{index}]")


def _check_part(part: Part, role: str, where: str) -> None:
    if part.type in REFUSED_PARTS:
        raise UnsupportedParameter(
            f"Parts of type {_show(part.type)} are not supported. {REFUSED_PARTS[part.type]}", param=f"{where}.type"
        )
    if part.type not in _PART_TYPES:
        raise InvalidParameter(
            f"`{where}.type` must be one of {', '.join(_PART_TYPES)}; got {_show(part.type)}.", param=f"{where}.type"
        )
    if getattr(part, part.type) is None:
        raise InvalidParameter(f"`{where}.{part.type}` is required.", param=f"{where}.{part.type}")
    if part.type == "refusal" and role != "assistant":
        raise InvalidParameter(f"`{where}` is a refusal, which only the assistant can utter.", param=f"{where}.type")
    if part.type in _MEDIA:
        _check_media(part, role, where)


def _check_media(part: Part, role: str, where: str) -> None:
    if role not in ("user", "tool"):
        raise InvalidParameter(
            f"`{where}`: messages of the {role} hold no pictures or videos. Put it in a message of the user.", param=where
        )
    if part.type == "image_url":
        assert part.image_url is not None
        _check_image(part.image_url, f"{where}.image_url")
    else:
        assert part.video_url is not None
        _check_video(part.video_url, f"{where}.video_url")


def _check_image(image: ImageURL, where: str) -> None:
    _check_pixels(image, where)
    if not image.url:
        raise InvalidParameter(f"`{where}.url` is empty: give a data: or https: URL.", param=f"{where}.url")


def _check_video(video: VideoURL, where: str) -> None:
    _check_pixels(video, where)
    if video.fps is not None and video.num_frames is not None:
        raise InvalidParameter(
            f"`{where}.fps` and `{where}.num_frames` exclude each other: give one of them.", param=f"{where}.num_frames"
        )
    if isinstance(video.url, str):
        if not video.url:
            raise InvalidParameter(f"`{where}.url` is empty: give a data: or https: URL.", param=f"{where}.url")
        return
    if video.num_frames is not None:
        raise InvalidParameter(
            f"`{where}.num_frames` samples a video file; of a list of frames all are taken. Leave it out.",
            param=f"{where}.num_frames",
        )
    for index, frame in enumerate(video.url):
        _check_frame(frame, f"{where}.url[{index}]")


def _check_frame(frame: str | Frame, where: str) -> None:
    if not _frame_url(frame):
        raise InvalidParameter(f"`{where}` must be the URL of a picture, or an object with `url`.", param=where)


def _check_pixels(sized: _Sized, where: str) -> None:
    for old, new in (("min_pixel", "min_pixels"), ("max_pixel", "max_pixels")):
        values = {getattr(sized, old), getattr(sized, new)} - {None}
        if len(values) > 1:
            raise InvalidParameter(
                f"`{where}.{old}` and `{where}.{new}` mean the same, but differ: give one of them.", param=f"{where}.{old}"
            )
    if (sized.least or 0) > (sized.most or math.inf):
        raise InvalidParameter(
            f"`{where}.min_pixels` {sized.least} exceeds `max_pixels` {sized.most}.", param=f"{where}.min_pixels"
        )


def _check_options(request: ChatRequest) -> None:
    for param, message in _contradictions(request):
        raise InvalidParameter(message, param=param)
    if request.stream_options and request.stream_options.include_obfuscation:
        raise UnsupportedParameter(
            "`stream_options.include_obfuscation` is not supported: leave it out.", param="stream_options.include_obfuscation"
        )


def _contradictions(request: ChatRequest) -> Iterator[tuple[str, str]]:
    most, same = request.max_tokens, request.max_completion_tokens
    if most and same and most != same:
        yield "max_tokens", "`max_tokens` and `max_completion_tokens` mean the same, but differ: give one of them."
    if request.min_tokens > (same or most or LARGEST):
        yield "min_tokens", f"`min_tokens` {request.min_tokens} exceeds the most tokens of the answer, {same or most}."
    if request.top_logprobs is not None and not request.logprobs:
        yield "top_logprobs", "`top_logprobs` needs `logprobs`: set it to true, or leave `top_logprobs` out."
    if request.stream_options is not None and not request.stream:
        yield "stream_options", "`stream_options` needs `stream`: set it to true, or leave `stream_options` out."


# Pydantic's faults in the words of the API

_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "missing": "is required",
        "string_type": "must be a string",
        "int_type": "must be an integer",
        "float_type": "must be a finite number",
        "finite_number": "must be a finite number",
        "bool_type": "must be true or false",
        "tuple_type": "must be an array",
        "dict_type": "must be an object",
        "model_type": "must be an object",
        "greater_than": "must be above {gt}",
        "greater_than_equal": "must be at least {ge}",
        "less_than_equal": "must be at most {le}",
        "literal_error": "must be {expected}",
        "too_short": "must have at least {min_length} item(s)",
        "too_long": "must have at most {max_length} items",
        "string_too_short": "must not be empty",
        "string_too_long": "must have at most {max_length} characters",
        "string_unicode": "must be valid Unicode, without lone surrogates",
        "string_pattern_mismatch": "must map token ids to numbers",
        "value_error": "{error}",
    }
)


def _explain(error: ValidationError) -> RequestError:
    """The first fault; unions are resolved by what was given, so that each fault stands at the one place it belongs to."""
    fault = error.errors(include_url=False)[0]
    param = _param(fault["loc"])
    words = _WORDS.get(fault["type"], "has the wrong type or shape").format(**fault.get("ctx", {}))
    if fault["type"] == "union_tag_not_found":
        words = "must be a string or an " + ("object" if "object" in fault["ctx"]["discriminator"] else "array")
    got = "" if fault["type"] == "missing" else f"; got {_show(fault['input'])}"
    hint = _HINTS.get(str(fault["loc"][-1]), "") if fault["loc"] and fault["type"] == "model_type" else ""
    return InvalidParameter(f"{f'`{param}`' if param else 'The request'} {words}{got}.{hint}", param=param or None)


_HINTS: Mapping[str, str] = MappingProxyType(
    {
        "image_url": ' Write "image_url": {"url": "..."}.',
        "video_url": ' Write "video_url": {"url": "..."}.',
    }
)


def _param(location: tuple[int | str, ...]) -> str:
    """OpenAI's notation of a place: `messages[0].content[1].image_url.url`."""
    if location and location[-1] == "[key]":
        location = location[:-2]
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in location if step not in _TAGS)
    return "".join(steps).removeprefix(".")


def _show(value: object) -> str:
    """A value in a message: short whatever its size, and safe whatever its depth."""
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:60] + "...")
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int):
        return str(value) if abs(value) < 10**30 else "a huge integer"
    if isinstance(value, float):
        return str(value)
    return "an object" if isinstance(value, dict) else "an array" if isinstance(value, (list, tuple)) else "another type"
