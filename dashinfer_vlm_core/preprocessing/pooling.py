"""Requests for embeddings and scores -> the conversations that the model was trained on.

The format is that of the published code of Qwen3-VL-Embedding and Qwen3-VL-Reranker: the instruction is the system
message of an embedding, and the beginning of the user's message of a score. The prompt ends with the beginning of a
response.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice

from ..errors import DashInferVLMError
from ..models.pooling import PoolingSpec
from ..protocol import EmbeddingRequest, LoRARequest, PoolingItem, RerankRequest, ScoreRequest
from ..protocol.messages import Message
from ..protocol.pooling import Parts, text_part

_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the"
    ' answer can only be "yes" or "no".'
)
_INSTRUCT, _QUERY, _DOCUMENT = "<Instruct>: ", "<Query>:", "\n<Document>:"
"""The texts of the published prompt of Qwen3-VL-Reranker."""

_PATH = re.compile(r"messages\[(?P<message>\d+)\](\.content\[(?P<part>\d+)\])?")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedItem:
    """An item with its place in the request of a client.

    Attributes:
        item: the item.
        path: the field of the request that it was created from, such as `input[3]`.
        rename: returns the field that a message or a content part of the item was created from, given by its own path;
            empty if the request has none.
    """

    item: PoolingItem
    path: str
    rename: Callable[[str], str] = lambda _: ""

    def name_field(self, error: DashInferVLMError) -> DashInferVLMError:
        """Change an error, so that it names the field of the client's request; returns it."""
        given = error.param or ""
        error.param = (self.rename(given) or self.path) if _PATH.match(given) else self.path
        message = _PATH.sub(lambda match: self.rename(match.group()) or self.path, error.message)
        error.message = message if error.param in message else f"`{error.param}`: {message}"
        error.args = (error.message,)
        return error


def embedding_items(request: EmbeddingRequest, pooling: PoolingSpec) -> list[PlacedItem]:
    """Return the items of a request: one for each text or list of token IDs, or one for the conversation."""
    system = Message.model_construct(role="system", content=as_sentence(request.instruction or pooling.instruction))
    template = request.item()
    if request.messages is not None:
        messages = request.conversation
        shift = int(messages[0].role not in {"system", "developer"})
        if shift:
            messages = (system, *messages)
        item = _with_messages(template, messages)
        return [PlacedItem(item=item, path="messages", rename=partial(_without_system, shift))]
    single = len(request.inputs) == 1 and request.inputs[0] is request.input
    return [
        PlacedItem(
            item=template.model_copy(update={"prompt": given})
            if not isinstance(given, str)
            else _with_messages(template, (system, Message.model_construct(role="user", content=given))),
            path="input" if single else f"input[{index}]",
        )
        for index, given in enumerate(request.inputs)
    ]


def score_items(
    request: RerankRequest | ScoreRequest, pooling: PoolingSpec, lora_request: LoRARequest | None
) -> list[PlacedItem]:
    """Return an item for each pair of a query and a document."""
    system = Message.model_construct(role="system", content=_JUDGE)
    instruct = text_part(_INSTRUCT + (request.instruction or pooling.instruction))
    before = (("", instruct), ("", text_part(_QUERY)))
    between = (("", text_part(_DOCUMENT)),)
    template = request.item(lora_request)
    items = []
    for query, document in request.pairs:
        parts = (before, query, between, document)  # not joined: thousands of pairs can share a long query
        user = Message.model_construct(role="user", content=tuple(part for _, part in chain(*parts)))
        items.append(
            PlacedItem(
                item=_with_messages(template, (system, user)),
                path=path_of_parts(document),
                rename=partial(rename_part, parts),
            )
        )
    return items


def path_of_parts(parts: Parts) -> str:
    """Return the path of a query or a document in the request, given its content parts."""
    return parts[0][0] if len(parts) == 1 else parts[0][0].rpartition(".")[0]


def rename_part(parts: Sequence[Parts], path: str) -> str:
    """Return the path in the request of a content part, given by its path in the only message with content parts, and
    these."""
    match = _PATH.match(path)
    if match is None or match["part"] is None:
        return ""
    place, _ = next(islice(chain(*parts), int(match["part"]), None), ("", None))
    return place and place + path[match.end() :]


def _without_system(shift: int, path: str) -> str:
    """Return the path of a message in the request, to which `shift` messages were added at the beginning."""
    match = _PATH.match(path)
    index = int(match["message"]) - shift if match else -1
    return f"messages[{index}]{path.partition(']')[2]}" if index >= 0 else ""


def _with_messages(template: PoolingItem, messages: Sequence[Message]) -> PoolingItem:
    return template.model_copy(update={"messages": tuple(messages)})


def as_sentence(instruction: str) -> str:
    """Return an instruction that ends with punctuation, as those of the training data do."""
    instruction = instruction.strip()
    ends = not instruction or unicodedata.category(instruction[-1]).startswith("P")
    return instruction if ends else f"{instruction}."
