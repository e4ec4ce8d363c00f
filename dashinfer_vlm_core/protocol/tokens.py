"""Tokenization requests, in the format of vLLM's server: text to token IDs and back."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..errors import InvalidParameter
from .base import LARGEST, Array, Name, Text
from .body import RequestBody
from .request import ChatRequest

MAX_TOKENS = 200_000


class TokenizePrompt(RequestBody):
    """A rendered prompt to encode. Special tokens in it are recognized.

    `add_special_tokens` has no effect: no tokens are added to the prompt.
    """

    prompt: Text
    model: Name | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChat(ChatRequest):
    """A chat request whose prompt is to be tokenized. Its images and videos are preprocessed, but not encoded.

    `add_special_tokens` has no effect: the chat template adds all special tokens.
    """

    add_special_tokens: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(RequestBody):
    """Token ids to convert to text, including special tokens."""

    tokens: Annotated[Array[Annotated[int, Field(ge=0, le=LARGEST)]], Field(max_length=MAX_TOKENS)]
    model: Name | None = None


def parse_tokenize(data: object) -> TokenizePrompt | TokenizeChat:
    """Validate a request to tokenize a prompt or messages.

    Raises:
        InvalidParameter: the request has neither or both of them, or a value is invalid.
        UnsupportedParameter: a known field requests an unsupported feature.
    """
    given = data if isinstance(data, dict) else {}
    if (given.get("prompt") is None) == (given.get("messages") is None):
        raise InvalidParameter("Pass either `prompt` or `messages`.", param="prompt")
    if given.get("prompt") is not None:
        return TokenizePrompt.parse(data)
    return TokenizeChat.parse(data)
