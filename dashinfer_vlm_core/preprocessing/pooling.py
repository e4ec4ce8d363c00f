"""Requests for embeddings and scores -> the conversations that the model was trained on.

The format is that of the published code of Qwen3-VL-Embedding and Qwen3-VL-Reranker: the instruction is the system
message of an embedding, and the beginning of the user's message of a score. The prompt ends with the beginning of a
response.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import DashInferVLMError
from ..models.pooling import PoolingSpec
from ..protocol import EmbeddingRequest, LoRARequest, PoolingItem, RerankRequest, ScoreRequest
from ..protocol.messages import Message
from ..protocol.pooling import text_part

_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the"
    ' answer can only be "yes" or "no".'
)
_INSTRUCT, _QUERY, _DOCUMENT = "<Instruct>: ", "<Query>:", "\n<Document>:"
"""The texts of the published prompt of Qwen3-VL-Reranker."""

_PATH = re.compile(r"messages\[\d+\](\.content\[\d+\])?")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedItem:
    """An item with its place in the request of a client.

    Attributes:
        item: the item.
        path: the field of the request that it was created from, such as `input[3]`.
        paths: the fields that its messages and content parts were created from, by their own paths.
    """

    item: PoolingItem
    path: str
    paths: Mapping[str, str] = field(default_factory=dict)

    def name_field(self, error: DashInferVLMError) -> DashInferVLMError:
        """Change an error, so that it names the field of the client's request; returns it."""
        given = error.param or ""
        error.param = self._rename(given) if _PATH.match(given) else self.path
        message = _PATH.sub(lambda match: self._rename(match.group()), error.message)
        error.message = message if error.param in message else f"`{error.param}`: {message}"
        error.args = (error.message,)
        return error

    def _rename(self, path: str) -> str:
        for own, place in self.paths.items():
            if path.startswith(own):
                return place + path.removeprefix(own)
        return self.path


def embedding_items(request: EmbeddingRequest, pooling: PoolingSpec) -> list[PlacedItem]:
    """Return the items of a request: one for each text or list of token IDs, or one for the conversation."""
    system = Message.model_construct(role="system", content=as_sentence(request.instruction or pooling.instruction))
    template = request.item()
    if request.messages is not None:
        messages = request.conversation
        shift = int(messages[0].role not in {"system", "developer"})
        if shift:
            messages = (system, *messages)
        paths = {f"messages[{index + shift}]": f"messages[{index}]" for index in range(len(messages))}
        return [PlacedItem(item=_with_messages(template, messages), path="messages", paths=paths)]
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
    template = request.item(lora_request)
    items = []
    for query, document in request.pairs:
        parts = [
            ("", instruct),
            ("", text_part(_QUERY)),
            *query,
            ("", text_part(_DOCUMENT)),
            *document,
        ]
        user = Message.model_construct(role="user", content=tuple(part for _, part in parts))
        items.append(
            PlacedItem(
                item=_with_messages(template, (system, user)),
                path=document[0][0] if len(document) == 1 else document[0][0].rpartition(".")[0],
                paths={f"messages[1].content[{index}]": path for index, (path, _) in enumerate(parts) if path},
            )
        )
    return items


def _with_messages(template: PoolingItem, messages: Sequence[Message]) -> PoolingItem:
    return template.model_copy(update={"messages": tuple(messages)})


def as_sentence(instruction: str) -> str:
    """Return an instruction that ends with punctuation, as those of the training data do."""
    instruction = instruction.strip()
    ends = not instruction or unicodedata.category(instruction[-1]).startswith("P")
    return instruction if ends else f"{instruction}."
