"""Token counts, from an engine in this process or a server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dashinfer_vlm_core.errors import ContextLengthExceeded, UnsupportedParameter

if TYPE_CHECKING:
    from dashinfer_vlm_core.engine import ChatEngine

    from .client import GetEngine


@runtime_checkable
class Tokenizer(Protocol):
    """An engine that can tokenize."""

    async def atokenize(self, request: Mapping[str, Any]) -> list[int]: ...

    async def aencode(self, text: str) -> list[int]: ...


async def encode(engine: GetEngine, text: str) -> list[int]:
    """Return the token IDs of a text. Raises the errors of `Engine.aencode`."""
    return await _tokenizer(await engine()).aencode(text)


async def count_tokens(engine: GetEngine, request: Mapping[str, Any]) -> int:
    """Return the number of prompt tokens of a request; more than the context length if it does not fit.

    Raises the errors of `Engine.atokenize`.
    """
    started = await engine()
    try:
        return len(await _tokenizer(started).atokenize(request))
    except ContextLengthExceeded as error:
        return error.prompt_tokens or await _more_than_context(started, error)


async def _more_than_context(engine: ChatEngine, error: ContextLengthExceeded) -> int:
    status = await asyncio.to_thread(engine.status)  # may send a request
    if not status.max_model_len:
        raise error
    return status.max_model_len + 1


def _tokenizer(engine: ChatEngine) -> Tokenizer:
    if not isinstance(engine, Tokenizer):
        raise UnsupportedParameter(
            "The engine of this chat model cannot count tokens. Set `custom_get_token_ids`, or use an `Engine`."
        )
    return engine
