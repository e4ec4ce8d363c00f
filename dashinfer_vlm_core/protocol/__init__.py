"""Requests: OpenAI's chat completions, validated completely before any other work.

    ChatRequest.parse:  unsupported fields ─▶ types and ranges (pydantic) ─▶ consistency between fields

Unknown keys are ignored, except in `media_io_kwargs`, `mm_processor_kwargs` and `structured_outputs`, where they are
rejected. Misspelled fields, and media in unknown ones, are rejected everywhere (`field_names`). `null` means absent.
Numbers are finite; booleans and strings are not converted to numbers.
"""

from .document_part import DocumentPart
from .media_part import DocumentPage, EncodedEmbeddings, MediaPart
from .pooling import EmbeddingRequest, PoolingItem, RerankRequest, ScoreRequest
from .request import DEFAULT_MAX_TOKENS, DEFAULT_MODEL, ChatRequest, LoRARequest, OfflineRequest
from .sources import LOW_DETAIL_PIXELS
from .token_embeddings import PoolingRequest
from .tokens import DetokenizeRequest, TokenizeChat, TokenizePrompt, parse_tokenize

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "DEFAULT_MODEL",
    "LOW_DETAIL_PIXELS",
    "ChatRequest",
    "DetokenizeRequest",
    "DocumentPage",
    "DocumentPart",
    "EmbeddingRequest",
    "EncodedEmbeddings",
    "LoRARequest",
    "MediaPart",
    "OfflineRequest",
    "PoolingItem",
    "PoolingRequest",
    "RerankRequest",
    "ScoreRequest",
    "TokenizeChat",
    "TokenizePrompt",
    "parse_tokenize",
]
