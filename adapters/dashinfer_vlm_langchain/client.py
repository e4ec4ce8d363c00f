"""The options of a call, and token counts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from dashinfer_vlm_core.errors import ContextLengthExceeded

if TYPE_CHECKING:
    from dashinfer_vlm_core.engine.shared import GetEngine


class CallOptions(BaseModel):
    """Options of a call that are not request fields.

    Attributes:
        timeout, first_token_timeout, max_retries: see `EngineCall`.
        stream_usage: whether the last chunk of a stream contains the usage.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    timeout: float | None = Field(gt=0)
    first_token_timeout: float | None = Field(gt=0)
    max_retries: int = Field(ge=0)
    stream_usage: bool


async def encode(engine: GetEngine, text: str) -> list[int]:
    """Return the token IDs of a text. Raises the errors of `Engine.aencode`."""
    return await (await engine()).aencode(text)


async def count_tokens(engine: GetEngine, request: Mapping[str, Any]) -> int:
    """Return the number of prompt tokens of a request; more than the context length if it does not fit.

    Raises the errors of `Engine.atokenize`.
    """
    started = await engine()
    try:
        return len(await started.atokenize(request))
    except ContextLengthExceeded as error:
        if error.prompt_tokens:
            return error.prompt_tokens
        status = await asyncio.to_thread(started.status)  # may send a request
        if not status.max_model_len:
            raise
        return status.max_model_len + 1
