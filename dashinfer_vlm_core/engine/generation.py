"""The response to one request, with its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .observers import RequestStateStats

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Generation:
    """The response to one request, with its tokens.

    Attributes:
        completion: the response, with all its choices.
        prompt_token_ids: the prompt's token ids; images and videos are represented by placeholders.
        token_ids: the token ids of each choice, including the one that ends it.
        stop_reasons: the stop string or the token of `stop_token_ids` that ended each choice; None for other reasons.
        stats: when the request was served.
    """

    completion: ChatCompletion
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[tuple[int, ...], ...]
    stop_reasons: tuple[str | int | None, ...]
    stats: RequestStateStats
