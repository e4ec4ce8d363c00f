"""The inputs and outputs of `VLM.embed` and `VLM.score`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import RequestError
from ..preprocessing.pooling import PlacedItem, as_sentence
from ..protocol import LoRARequest, PoolingItem
from ..protocol.validation_errors import invalid, show
from .inputs import MediaDefaults, is_single_conversation, message_fields, prompt_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingOutput:
    """An embedding."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The number of dimensions."""
        return len(self.embedding)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenEmbeddingOutput:
    """The embeddings of the tokens of a prompt, float32 [tokens, dimensions]."""

    data: npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringOutput:
    """How relevant a document is for a query: a probability or, with late interaction, a sum of similarities."""

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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenEmbeddingRequestOutput(PoolingRequestOutput):
    """The output of one prompt of `VLM.encode`."""

    outputs: TokenEmbeddingOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringRequestOutput(PoolingRequestOutput):
    """The output of one pair of `VLM.score`."""

    outputs: ScoringOutput


def embedding_items(
    prompts: Iterable[object],
    defaults: MediaDefaults,
    *,
    instruction: str | None = None,
    template_options: Mapping[str, bool] = MappingProxyType({}),
    truncate_prompt_tokens: int | None,
    lora_request: LoRARequest | None,
) -> list[PlacedItem]:
    """Return the items of rendered prompts and conversations.

    Args:
        prompts: the prompts.
        defaults: the options of media.
        instruction: the system message of conversations without one; None to add none.
        template_options: variables of the template, for conversations.
        truncate_prompt_tokens: see `PoolingItem`.
        lora_request: the LoRA adapter.

    Raises:
        InvalidParameter, UnsupportedParameter: a prompt is invalid; `param` is `prompts` with its index.
    """
    options = {"truncate_prompt_tokens": truncate_prompt_tokens, "lora_request": lora_request}
    items = []
    for index, prompt in enumerate(prompts):
        try:
            item = PoolingItem.parse({**_fields(prompt, defaults, instruction, template_options), **options})
        except RequestError as error:
            raise PlacedItem(item=PoolingItem.model_construct(), path=f"prompts[{index}]").name_field(error) from None
        items.append(PlacedItem(item=item, path=f"prompts[{index}]"))
    return items


def _fields(
    prompt: object, defaults: MediaDefaults, instruction: str | None, template_options: Mapping[str, bool]
) -> dict[str, Any]:
    if not is_single_conversation(prompt):
        return prompt_fields(prompt, defaults)
    messages: list[Mapping[str, Any]] = list(prompt)  # type: ignore[call-overload]
    if instruction is not None and messages[0].get("role") not in {"system", "developer"}:
        messages.insert(0, {"role": "system", "content": as_sentence(instruction)})
    return {**message_fields(messages), "chat_template_kwargs": dict(template_options), **defaults.fields(None)}


def check_choice(name: str, value: str, choices: list[str]) -> None:
    """Check that the value of an argument is one of its choices.

    Raises:
        InvalidParameter: it is not; `param` is the name of the argument.
    """
    if value not in choices:
        raise invalid(name, f"must be {' or '.join(map(repr, choices))}, got {show(value)}.")
