"""The inputs and outputs of `VLM.embed` and `VLM.score`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError
from ..preprocessing.pooling import PlacedItem, as_sentence
from ..protocol import LoRARequest, PoolingItem
from .inputs import MediaDefaults, is_single_conversation, message_fields, prompt_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingOutput:
    """An embedding."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The number of dimensions."""
        return len(self.embedding)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringOutput:
    """The probability that a document is relevant for a query."""

    score: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingRequestOutput:
    """What the outputs of a prompt or a pair have in common, with vLLM's names.

    Attributes:
        request_id: the number of the prompt, unique in a `VLM`.
        num_prompt_tokens: the tokens of the prompt, with visual tokens.
    """

    request_id: str
    num_prompt_tokens: int

    @property
    def finished(self) -> bool:
        """True: outputs are returned when they are complete."""
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingRequestOutput(PoolingRequestOutput):
    """The output of one prompt of `VLM.embed`."""

    outputs: EmbeddingOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringRequestOutput(PoolingRequestOutput):
    """The output of one pair of `VLM.score`."""

    outputs: ScoringOutput


def embedding_items(
    prompts: Iterable[object],
    defaults: MediaDefaults,
    *,
    instruction: str,
    truncate_prompt_tokens: int | None,
    lora_request: LoRARequest | None,
) -> list[PlacedItem]:
    """Return the items of rendered prompts and conversations.

    Raises:
        InvalidParameter, UnsupportedParameter: a prompt is invalid; `param` is `prompts` with its index.
    """
    options = {"truncate_prompt_tokens": truncate_prompt_tokens, "lora_request": lora_request}
    items = []
    for index, prompt in enumerate(prompts):
        try:
            item = PoolingItem.parse({**_fields(prompt, defaults, instruction), **options})
        except RequestError as error:
            raise PlacedItem(item=PoolingItem.model_construct(), path=f"prompts[{index}]").name_field(error) from None
        items.append(PlacedItem(item=item, path=f"prompts[{index}]"))
    return items


def _fields(prompt: object, defaults: MediaDefaults, instruction: str) -> dict[str, Any]:
    if not is_single_conversation(prompt):
        return prompt_fields(prompt, defaults)
    messages: list[Mapping[str, Any]] = list(prompt)  # type: ignore[call-overload]
    if messages[0].get("role") not in {"system", "developer"}:
        messages.insert(0, {"role": "system", "content": as_sentence(instruction)})
    return {**message_fields(messages), **defaults.fields(None)}
