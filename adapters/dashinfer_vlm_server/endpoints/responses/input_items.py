"""The items that a response is generated from: as they are stored, referred to and listed."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, Field

from dashinfer_vlm_core.errors import InvalidParameter
from dashinfer_vlm_core.protocol.response_items import InputItem

from ...errors import ApiError

Json: TypeAlias = dict[str, Any]

_PREFIXES: Mapping[str, str] = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "compaction": "cmp",
}


class ItemQuery(BaseModel):
    """OpenAI's query parameters of a list of items. `include` has no effect: items are complete.

    Attributes:
        after: the ID of the item before the page.
        limit: the maximum number of items.
        order: whether the oldest or the newest item is the first.
    """

    after: str | None = None
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"


class ItemList(BaseModel):
    """A page of items in OpenAI's format; the IDs of an empty page are null."""

    object: Literal["list"] = "list"
    data: list[Json]
    first_id: str | None
    last_id: str | None
    has_more: bool


def to_stored_item(item: InputItem) -> Json:
    """Return an item of a request as JSON, with a new ID: those of clients need not be unique in a conversation."""
    item_id = f"{_PREFIXES.get(item.type, item.type)}_{uuid.uuid4().hex}"
    return {**item.model_dump(exclude_unset=True), "type": item.type, "id": item_id}


def find_references(
    items: Sequence[InputItem],
    history: Sequence[Mapping[str, Any]],
    find: Callable[[Collection[str]], Mapping[str, Mapping[str, Any]]],
) -> Mapping[str, Mapping[str, Any]]:
    """Return the stored items that the items of a request refer to, by ID.

    Args:
        items: the items of the request.
        history: the items of the conversation that it continues.
        find: returns stored items by ID, without those that are unknown.

    Raises:
        HTTPException: 404, an item is unknown.
        InvalidParameter: an item would be in the conversation twice.
    """
    ids = [item.id for item in items if item.is_reference and item.id is not None]
    if not ids:
        return {}
    uses = Counter([item["id"] for item in history] + [item.id for item in items])
    found = find(ids)
    for item_id in ids:
        if item_id not in found:
            raise ApiError(
                404,
                f"Item with id {item_id[:80]!r} not found. Items are not persisted when `store` is set to false, and"
                " are removed to store newer ones. Send the item itself.",
                code="item_not_found",
                param="input",
            )
        if uses[item_id] > 1:
            raise InvalidParameter(
                f"Duplicate item found with id {item_id[:80]!r}. Remove duplicate items from your input, and those that"
                " the previous response contains.",
                param="input",
            )
    return found


def list_items(items: Sequence[Mapping[str, Any]], query: ItemQuery) -> ItemList:
    """Return a page of items.

    Args:
        items: the items in the order of the conversation, as `to_stored_item` returns them, or output items.
        query: which of them.

    Raises:
        InvalidParameter: `after` is not the ID of an item.
    """
    ordered = items if query.order == "asc" else items[::-1]
    start = _start(ordered, query.after)
    page = [_to_openai(item) for item in ordered[start : start + query.limit]]
    return ItemList(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=start + query.limit < len(ordered),
    )


def _start(items: Sequence[Mapping[str, Any]], after: str | None) -> int:
    if after is None:
        return 0
    for index, item in enumerate(items):
        if item["id"] == after:
            return index + 1
    raise InvalidParameter(
        f"`after` is {after[:80]!r}, which is not the ID of an item of this response. Pass the `last_id` of a page.",
        param="after",
    )


def _to_openai(item: Mapping[str, Any]) -> Json:
    fields: Json = dict(item)
    if fields["type"] == "reasoning":
        return {"summary": [], **fields}
    if fields["type"] == "compaction":
        return fields
    if fields["type"] == "message":
        fields["content"] = _message_content(fields["role"], fields["content"])
    return {"status": "completed", **fields}


def _message_content(role: str, content: str | Sequence[Json]) -> list[Json]:
    text_type = "output_text" if role == "assistant" else "input_text"
    parts = [{"type": text_type, "text": content}] if isinstance(content, str) else content
    return [{"annotations": [], **part} if part["type"] == "output_text" else part for part in parts]
