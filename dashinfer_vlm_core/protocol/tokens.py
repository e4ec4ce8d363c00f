"""Requests to count: text to token ids and back, as vLLM's server takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

from pydantic import Field, Strict, ValidationError

from ..errors import InvalidParameter
from .base import LARGEST, LenientModel, Name, Text
from .request import ChatRequest
from .validation_errors import explain

T = TypeVar("T")

MAX_TOKENS = 200_000


class TokenizePrompt(LenientModel):
    """A rendered prompt to encode; control tokens in it count as such."""

    prompt: Text
    model: Name | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChat(ChatRequest):
    """A chat request whose prompt is wanted: its pictures and videos are cut, but not encoded."""

    add_special_tokens: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(LenientModel):
    """Token ids to turn into text, control tokens included."""

    tokens: Annotated[
        tuple[Annotated[int, Field(ge=0, le=LARGEST)], ...], Strict(False), Field(max_length=MAX_TOKENS, fail_fast=True)
    ]
    model: Name | None = None

    @classmethod
    def parse(cls, data: object) -> DetokenizeRequest:
        """Raises InvalidParameter, as `ChatRequest.parse`."""
        return _checked(cls.model_validate, data)


def parse_tokenize(data: object) -> TokenizePrompt | TokenizeChat:
    """What is to be encoded: a prompt, or messages.

    Raises:
        InvalidParameter: neither of them, or both; or as `ChatRequest.parse`.
        UnsupportedParameter: as `ChatRequest.parse`.
    """
    given = data if isinstance(data, dict) else {}
    if (given.get("prompt") is None) == (given.get("messages") is None):
        raise InvalidParameter("Give either `prompt` or `messages`.", param="prompt")
    if given.get("prompt") is not None:
        return _checked(TokenizePrompt.model_validate, data)
    return _checked(TokenizeChat.model_validate, data)


def _checked(validate: Callable[[object], T], data: object) -> T:
    try:
        return validate(data)
    except ValidationError as error:
        raise explain(error) from None
