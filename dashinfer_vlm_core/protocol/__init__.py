"""The request: OpenAI's chat completion, checked whole before anything else happens.

    ChatRequest.parse:  known but not honoured ─▶ shape (pydantic) ─▶ sense (what one field says of another)

Unknown keys are tolerated at every level, `null` means absent, numbers are finite, and never booleans or strings.
"""

from .messages import LOW_DETAIL_PIXELS, EncodedEmbeddings, MediaPart
from .request import DEFAULT_MAX_TOKENS, DEFAULT_MODEL, ChatRequest, OfflineRequest
from .tokens import DetokenizeRequest, TokenizeChat, TokenizePrompt, parse_tokenize

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "DEFAULT_MODEL",
    "LOW_DETAIL_PIXELS",
    "ChatRequest",
    "DetokenizeRequest",
    "EncodedEmbeddings",
    "MediaPart",
    "OfflineRequest",
    "TokenizeChat",
    "TokenizePrompt",
    "parse_tokenize",
]
