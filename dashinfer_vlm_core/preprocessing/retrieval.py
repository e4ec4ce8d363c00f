"""Queries and documents for late interaction -> the prompts that ColQwen models were trained on."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path

from ..errors import ConfigError, InvalidParameter
from ..models.pooling import RetrievalFormat
from ..protocol import LoRARequest, PoolingItem, PoolingRequest, RerankRequest, ScoreRequest
from ..protocol.messages import Message
from ..protocol.pooling import Parts
from ..tokenization.chat_template import DEFAULT, ChatTemplate
from .pooling import PlacedItem, path_of_parts, rename_part

IS_QUERY = "is_query"
"""The variable of the template that is true for queries."""

_TEMPLATE = """
{%- if messages | length != 1 or messages[0].role != "user" %}
    {{- raise_exception("a query or a document is one message of the user. Send one for each.") }}
{%- endif %}
{%- set message = messages[0] %}
{%- set parts = [{"type": "text", "text": message.content}] if message.content is string else message.content %}
{%- set media = parts | rejectattr("type", "equalto", "text") | map(attribute="type") | list %}
{%- set text = parts | selectattr("type", "equalto", "text") | join("", attribute="text") %}
{%- if media %}
    {%- set prompt = media_text.replace("image", "video") if "video" in media else media_text %}
    {{- media_prefix }}
    {%- for kind in media %}{{ "<|vision_start|><|" ~ kind ~ "_pad|><|vision_end|>" }}{% endfor %}
    {{- prompt ~ (" " ~ text if text and text != prompt else "") ~ media_suffix }}
{%- elif is_query %}
    {{- query_prefix ~ text ~ query_suffix }}
{%- else %}
    {{- text ~ document_suffix }}
{%- endif %}
"""
"""A text that equals that of the prompt is not repeated: vLLM's clients send it with the image."""


def retrieval_template(prompts: RetrievalFormat, override: Path | None) -> ChatTemplate:
    """Return a chat template that renders one message, which is a query or a document, in the format of a model.

    Raises:
        ConfigError: `override`, the file of another template, is given.
    """
    if override is not None:
        raise ConfigError(
            "`chat_template` has no effect on this model: queries and documents have the prompts that it was trained"
            " with. Remove it.",
            param="chat_template",
        )
    return ChatTemplate({DEFAULT: _TEMPLATE}, asdict(prompts))


def token_items(request: PoolingRequest) -> list[PlacedItem]:
    """Return the items of a request: one for each text or list of token IDs, or one for the message.

    Raises:
        InvalidParameter: the request has an instruction.
    """
    _reject_instruction(request.instruction)
    template = request.item()
    if request.messages is not None:
        item = _with_messages(template, request.conversation, is_query=request.input_type == "query")
        return [PlacedItem(item=item, path="messages", rename=str)]
    single = len(request.inputs) == 1 and request.inputs[0] is request.input
    is_query = request.input_type != "document"
    return [
        PlacedItem(
            item=_with_messages(template, (Message.model_construct(role="user", content=given),), is_query=is_query)
            if isinstance(given, str)
            else template.model_copy(update={"prompt": given}),
            path="input" if single else f"input[{index}]",
        )
        for index, given in enumerate(request.inputs)
    ]


def late_interaction_items(
    request: RerankRequest | ScoreRequest, lora_request: LoRARequest | None
) -> list[tuple[PlacedItem, PlacedItem]]:
    """Return the items of the query and the document of each pair; pairs with the same query share its item.

    Raises:
        InvalidParameter: the request has an instruction.
    """
    _reject_instruction(request.instruction)
    template = request.item(lora_request)
    queries: dict[int, PlacedItem] = {}
    pairs = request.pairs  # keeps the queries alive, so that their ids differ
    for query, _ in pairs:
        if id(query) not in queries:
            queries[id(query)] = _placed(template, query, is_query=True)
    return [(queries[id(query)], _placed(template, document, is_query=False)) for query, document in pairs]


def _placed(template: PoolingItem, parts: Parts, *, is_query: bool) -> PlacedItem:
    message = Message.model_construct(role="user", content=tuple(part for _, part in parts))
    return PlacedItem(
        item=_with_messages(template, (message,), is_query=is_query),
        path=path_of_parts(parts),
        rename=partial(rename_part, (parts,)),
    )


def _with_messages(template: PoolingItem, messages: tuple[Message, ...], *, is_query: bool) -> PoolingItem:
    return template.model_copy(update={"messages": messages, "chat_template_kwargs": {IS_QUERY: is_query}})


def _reject_instruction(instruction: str | None) -> None:
    if instruction is not None:
        raise InvalidParameter(
            "`instruction` is not supported: the model was trained without instructions. Remove it.",
            param="instruction",
        )
