"""The session of a request: requests with equal sessions are sent to the same replica."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from dashinfer_vlm_core.protocol import DocumentPart, EncodedEmbeddings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dashinfer_vlm_core.protocol import ChatRequest, MediaPart
    from dashinfer_vlm_core.protocol.client import Client

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
    digest = hashlib.blake2b(digest_size=16)
    for text in (client.effective_cache_salt(request.cache_salt) or "", *_content(request)):
        data = text.encode()
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.hexdigest()


def _content(request: ChatRequest) -> Iterator[str]:
    media = _first_media(request)
    if media is None:
        yield from _opening(request)
    elif isinstance(media, DocumentPart):
        yield from (media.kind, media.url)
    elif media.uuid is not None:
        yield from ("uuid", media.uuid)
    elif isinstance(media.content, EncodedEmbeddings):
        yield from ("embeddings", media.content.rows)
    else:
        yield media.kind
        yield from (media.url,) if isinstance(media.url, str) else media.url or ()


def _first_media(request: ChatRequest) -> MediaPart | DocumentPart | None:
    parts = (item for i, message in enumerate(request.messages) for item in message.parts(f"messages[{i}]"))
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
