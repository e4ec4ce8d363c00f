"""The session of a request: requests with equal sessions are sent to the same replica."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from dashinfer_vlm_core.protocol import DocumentPart, EmbeddingRequest, EncodedEmbeddings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dashinfer_vlm_core.protocol import ChatRequest, MediaPart, RerankRequest, ScoreRequest
    from dashinfer_vlm_core.protocol.client import Client
    from dashinfer_vlm_core.protocol.messages import Part

PROMPT_TOKENS = 64
"""How many tokens of a prompt without messages make its session."""

PROMPT_CHARACTERS = 4 * PROMPT_TOKENS
"""The same of a text."""


def session_id(request: ChatRequest, client: Client) -> str:
    """Return a digest of what makes the caches of a replica useful for a request.

    It is the first image, video or document of the conversation, since its embeddings and the keys and values that
    follow it are cached: its `uuid`, else its URL or content. Without media, it is the text up to the first message of
    the user, or the beginning of a prompt without messages. Neither changes when the conversation continues. Requests
    that share no cached data have different sessions.
    """
    parts = (part for i, message in enumerate(request.messages) for part in message.parts(f"messages[{i}]"))
    media = _first_media(parts)
    return _digest(request.cache_salt, client, _opening(request) if media is None else _media_content(media))


def pooling_session_id(request: EmbeddingRequest | RerankRequest | ScoreRequest, client: Client) -> str:
    """Return the session of a request for embeddings or scores: a digest of its first image, video or document.

    It is empty without media: texts share no cached data with other requests, and go to any replica.
    """
    media = _first_media(_pooling_parts(request))
    return "" if media is None else _digest(request.cache_salt, client, _media_content(media))


def _digest(cache_salt: str | None, client: Client, content: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for text in (client.effective_cache_salt(cache_salt) or "", *content):
        data = text.encode()
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.hexdigest()


def _pooling_parts(request: EmbeddingRequest | RerankRequest | ScoreRequest) -> Iterator[tuple[str, Part]]:
    if isinstance(request, EmbeddingRequest):
        for index, message in enumerate(request.conversation):
            yield from message.parts(f"messages[{index}]")
    else:
        for query, document in request.pairs:
            yield from (*query, *document)


def _media_content(media: MediaPart | DocumentPart) -> Iterator[str]:
    if isinstance(media, DocumentPart):
        yield from (media.kind, media.url)
    elif media.uuid is not None:
        yield from ("uuid", media.uuid)
    elif isinstance(media.content, EncodedEmbeddings):
        yield from ("embeddings", media.content.rows)
    else:
        yield media.kind
        yield from (media.url,) if isinstance(media.url, str) else media.url or ()


def _first_media(parts: Iterable[tuple[str, Part]]) -> MediaPart | DocumentPart | None:
    return next((media for path, part in parts for media in (*part.media(path), part.document(path)) if media), None)


def _opening(request: ChatRequest) -> Iterator[str]:
    if isinstance(request.raw_prompt, str):
        yield request.raw_prompt[:PROMPT_CHARACTERS]
    elif request.raw_prompt is not None:
        yield str(request.raw_prompt[:PROMPT_TOKENS])
    # These messages stay the same in later turns.
    for message in request.messages:
        yield json.dumps(message.for_template(), sort_keys=True)
        if message.role == "user":
            return
