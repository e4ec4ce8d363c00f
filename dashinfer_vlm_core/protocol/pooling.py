"""Requests for embeddings, scores and ranks: OpenAI's embeddings with vLLM's `messages`, Jina's and Cohere's reranking,
and vLLM's scores."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from .base import LARGEST, Array, Count, Label, Name, RequestModel, StringOrArray, StringOrObject, encodable
from .body import CheckedBody
from .field_names import UnknownMedia
from .fields import IGNORED_FIELDS, REJECTED_FIELDS, RejectedFields
from .messages import MAX_PARTS, UNKNOWN_MEDIA, Message, Part, check_tool_arguments
from .options import MediaIO, MediaOptions, ProcessorOptions
from .request import DEFAULT_MODEL, MAX_MESSAGES, LoRARequest, OfflineRequest
from .validation_errors import invalid
from .vllm_xargs import TokenId

_REJECTED: RejectedFields = {
    "chat_template": REJECTED_FIELDS["chat_template"],
    **dict.fromkeys(
        ("use_activation", "activation"),
        ((True,), "Scores are probabilities, and embeddings are normalized as the model's files say."),
    ),
    "softmax": ((True,), "Scores are probabilities. Remove it."),
    "normalize": ((True,), "Embeddings are normalized as the model's files say. Remove it."),
    "rank_fields": ((), "Documents have `text`, `image`, `video` or `content`. Remove it."),
    "max_chunks_per_doc": ((1,), "Documents are not split. Set `truncate_prompt_tokens` to cut long ones."),
    "max_tokens_per_doc": ((), "Set `truncate_prompt_tokens`, which counts the query and the document."),
    "embed_dtype": (("float32",), "Embeddings are float32. Remove it."),
    "endianness": (("native", "little"), "Embeddings are in little-endian order. Remove it."),
    "priority": ((0,), "Requests have no priority. Remove it."),
}

NonEmptyText = Annotated[str, Field(min_length=1), AfterValidator(encodable)]
TokenIds = Annotated[Array[TokenId], Field(min_length=1)]


def _input_shape(value: object) -> str | None:
    if isinstance(value, (list, tuple)):
        return "ids" if value and type(value[0]) is int else "array"
    return "string"


_Item = StringOrArray[NonEmptyText, TokenIds]
_Input = Annotated[
    Annotated[NonEmptyText, Tag("string")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[Annotated[Array[_Item], Field(min_length=1)], Tag("array")],
    Discriminator(_input_shape),
]


class PoolingItem(OfflineRequest):
    """One prompt that is pooled: created from a validated request, or by code in this process.

    Attributes:
        truncate_prompt_tokens: the most tokens of the prompt, whose text is cut; -1 for the model's limit. None to
            reject longer ones.
    """

    _rejected_fields: ClassVar[RejectedFields] = {
        name: rejection for name, rejection in REJECTED_FIELDS.items() if name != "truncate_prompt_tokens"
    }

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=LARGEST)] | None = None

    @property
    def prompt_limit(self) -> int | None:
        return self.truncate_prompt_tokens


class PoolingBody(CheckedBody):
    """The fields that all requests to pooling models have, in addition to their inputs.

    Attributes:
        instruction: what the embedding or the score is for; the model's default if absent.
        truncate_prompt_tokens: as `PoolingItem.truncate_prompt_tokens`.
        cache_salt: as in chat requests.
    """

    _rejected_fields: ClassVar[RejectedFields] = _REJECTED
    _accepted_fields: ClassVar[Collection[str]] = (
        IGNORED_FIELDS | _REJECTED.keys() | {"add_special_tokens", "request_id"}
    )

    model: Name = DEFAULT_MODEL
    instruction: NonEmptyText | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=LARGEST)] | None = None
    media_io_kwargs: MediaIO = MediaIO()
    mm_processor_kwargs: ProcessorOptions = ProcessorOptions()
    cache_salt: Label | None = None

    @model_validator(mode="after")
    def _check_media_options(self) -> PoolingBody:
        MediaOptions(self.media_io_kwargs, self.mm_processor_kwargs).check()
        if self.truncate_prompt_tokens == 0:
            raise invalid("truncate_prompt_tokens", "must be a number of tokens, or -1 for the model's limit; got 0.")
        return self

    def item(self, lora_request: LoRARequest | None = None) -> PoolingItem:
        """Return an item with these options and the adapter of a caller in this process, without messages."""
        names = ("model", "truncate_prompt_tokens", "media_io_kwargs", "mm_processor_kwargs", "cache_salt")
        options = {name: getattr(self, name) for name in names}
        return PoolingItem.model_construct(**options, lora_request=lora_request)


class EmbeddingRequest(PoolingBody):
    """A request for embeddings: of each text or list of token IDs of `input`, or one of the conversation `messages`.

    A last message of the assistant without text, as vLLM's clients send it with `continue_final_message`, has no
    effect: prompts end with the beginning of a response in any case.
    """

    _unknown_media: ClassVar[UnknownMedia | None] = UNKNOWN_MEDIA

    input: _Input | None = None
    messages: Annotated[Array[Message], Field(max_length=MAX_MESSAGES)] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _check_inputs(self) -> EmbeddingRequest:
        if (self.input is None) == (self.messages is None):
            raise invalid(
                "input" if self.messages is None else "messages",
                'is required. Pass a string or an array: "input": "...".'
                if self.messages is None
                else "and `input` cannot be combined. Pass one of them.",
            )
        for index, message in enumerate(self.messages or ()):
            message.check(f"messages[{index}]")
        check_tool_arguments(self.messages or ())
        if self.messages is not None:
            self._check_messages()
        return self

    def _check_messages(self) -> None:
        conversation = self.conversation
        if not conversation:
            raise invalid("messages", "must not be empty.")
        if self.instruction is not None and conversation[0].role in {"system", "developer"}:
            raise invalid("instruction", "and a system message are the same. Pass one of them.")
        if conversation[-1].role == "assistant":
            raise invalid(
                f"messages[{len(conversation) - 1}]",
                "is of the assistant. The last message with text must be a user's.",
            )

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The messages without the empty beginning of a response."""
        messages = self.messages or ()
        return messages[:-1] if messages and _is_empty_response(messages[-1]) else messages

    @property
    def inputs(self) -> tuple[str | tuple[int, ...], ...]:
        """The entries of `input`."""
        given = self.input
        if given is None:
            return ()
        return (given,) if isinstance(given, str) or isinstance(given[0], int) else given


def _is_empty_response(message: Message) -> bool:
    content = message.content
    texts = [content or ""] if not isinstance(content, tuple) else [part.text for part in content]
    return message.role == "assistant" and not any(texts) and not message.tool_calls


class Document(RequestModel):
    """A query or a document: a text, an image, a video or several of them in the order video, image, text, or content
    parts as of a message."""

    _unknown_media: ClassVar[UnknownMedia | None] = UNKNOWN_MEDIA

    text: NonEmptyText | None = None
    image: NonEmptyText | None = None
    video: NonEmptyText | None = None
    content: StringOrArray[NonEmptyText, Annotated[Array[Part], Field(min_length=1, max_length=MAX_PARTS)]] | None = (
        None
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_part(cls, data: object) -> object:
        """Accept a content part in place of a document, as vLLM does."""
        if isinstance(data, dict) and isinstance(data.get("type"), str):
            return {"content": [data]}
        return data

    def parts(self, path: str) -> list[tuple[str, Part]]:
        """Return the content parts, each with its path.

        Raises:
            InvalidParameter: there is none, or `content` is combined with others.
        """
        named = [
            (f"{path}.{name}", _media_part(name, value))
            for name, value in (("video", self.video), ("image", self.image))
            if value
        ]
        if self.text:
            named.append((f"{path}.text", text_part(self.text)))
        if self.content is None:
            if not named:
                raise invalid(path, "is empty. Pass a string, or an object with `text`, `image`, `video` or `content`.")
            return named
        if named:
            raise invalid(named[0][0], f"and `{path}.content` cannot be combined. Pass one of them.")
        if isinstance(self.content, str):
            return [(f"{path}.content", text_part(self.content))]
        return [(f"{path}.content[{index}]", part) for index, part in enumerate(self.content)]


def text_part(text: str) -> Part:
    """Return the content part of a text."""
    return Part.model_construct(type="text", text=text)


def _media_part(kind: str, value: str) -> Part:
    """Return the part of a URL, or of a file in base64 as Jina's clients send it."""
    is_url = value[:256].partition(":")[0].lower() in {"data", "http", "https", "file"}
    subtype = {"image": "png", "video": "mp4"}[kind]  # the format is detected from the content
    url = value if is_url else f"data:{kind}/{subtype};base64,{value}"
    return Part.model_validate({"type": f"{kind}_url", f"{kind}_url": {"url": url}})


Parts = tuple[tuple[str, Part], ...]
"""Content parts, each with its path in the request."""

_Documents = StringOrObject[NonEmptyText, Document]
_OneOrMany = Annotated[
    Annotated[NonEmptyText, Tag("string")]
    | Annotated[Document, Tag("object")]
    | Annotated[Annotated[Array[_Documents], Field(min_length=1)], Tag("array")],
    Discriminator(lambda value: {str: "string", list: "array", tuple: "array"}.get(type(value), "object")),
]


def _parts(document: str | Document, path: str) -> Parts:
    if isinstance(document, str):
        return ((path, text_part(document)),)
    parts = document.parts(path)
    for part_path, part in parts:
        part.check("user", part_path)
    return tuple(parts)


def _expand(given: str | Document | tuple[str | Document, ...], name: str) -> list[Parts]:
    """Return the content of each entry. Each part of an object with `content` is an entry, as in vLLM."""
    if isinstance(given, tuple):
        return [_parts(document, f"{name}[{index}]") for index, document in enumerate(given)]
    parts = _parts(given, name)
    return [parts] if isinstance(given, str) or given.content is None else [(part,) for part in parts]


class RerankRequest(PoolingBody):
    """A request to rank documents by their relevance for a query, with the fields of Jina and Cohere."""

    query: StringOrObject[NonEmptyText, Document]
    documents: _OneOrMany
    top_n: Annotated[int, Field(ge=0, le=LARGEST)] | None = None
    return_documents: bool = True

    @model_validator(mode="after")
    def _check_documents(self) -> RerankRequest:
        _ = self.pairs
        return self

    @cached_property
    def pairs(self) -> list[tuple[Parts, Parts]]:
        """The query with each document."""
        query = _parts(self.query, "query")
        return [(query, document) for document in _expand(self.documents, "documents")]

    def texts(self) -> list[str | None]:
        """Return the text of each document; None for those without one."""
        documents = ([part.text for _, part in document if part.text] for _, document in self.pairs)
        return ["\n".join(texts) if texts else None for texts in documents]


class ScoreRequest(PoolingBody):
    """A request to score pairs of a query and a document, with vLLM's fields: one query with each document, or as many
    queries as documents."""

    _ALIASES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "queries": ("queries", "text_1", "data_1"),
        "documents": ("documents", "text_2", "data_2", "items"),
    }
    queries: _OneOrMany
    documents: _OneOrMany

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        renamed: dict[str, Any] = dict(data)
        for name, aliases in cls._ALIASES.items():
            given = [alias for alias in aliases if renamed.get(alias) is not None]
            if len(given) > 1:
                raise invalid(given[1], f"and `{given[0]}` are the same. Pass one of them.")
            if given:
                renamed[name] = renamed.pop(given[0])
        return renamed

    @model_validator(mode="after")
    def _check_documents(self) -> ScoreRequest:
        _ = self.pairs
        return self

    @cached_property
    def pairs(self) -> list[tuple[Parts, Parts]]:
        """The pairs to score."""
        queries, documents = _expand(self.queries, "queries"), _expand(self.documents, "documents")
        if len(queries) == 1:
            return [(queries[0], document) for document in documents]
        if len(queries) != len(documents):
            raise invalid(
                "queries",
                f"has {len(queries)} entries, but `documents` has {len(documents)}. Pass one query, or one for each"
                " document.",
            )
        return list(zip(queries, documents, strict=True))
