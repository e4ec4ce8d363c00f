"""`/tokenize` and `/detokenize`, in vLLM's format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from pydantic import BaseModel
from starlette.exceptions import HTTPException

from dashinfer_vlm_core.errors import ModelNotFound
from dashinfer_vlm_core.protocol import DEFAULT_MODEL, TokenizeChat, TokenizePrompt

if TYPE_CHECKING:
    from dashinfer_vlm_core.engine import ChatEngine, Request
    from dashinfer_vlm_core.protocol import DetokenizeRequest


class TokenizeResponse(BaseModel):
    """Token IDs of a prompt and, if requested, the tokens as strings of the vocabulary."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    """The text of token IDs."""

    prompt: str


@runtime_checkable
class SupportsTokenization(Protocol):
    """An engine in this process, which has a tokenizer; a remote engine does not."""

    async def atokenize(self, request: Request) -> list[int]: ...

    async def aencode(self, text: str) -> list[int]: ...

    async def adecode(self, ids: Sequence[int]) -> str: ...

    async def aconvert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]: ...


async def tokenize(engine: ChatEngine, request: TokenizePrompt | TokenizeChat) -> TokenizeResponse:
    """Handle `/tokenize`.

    Raises:
        HTTPException: 501, the engine has no tokenizer.
        RequestError, EngineError: raised by the engine.
    """
    tokenizer = tokenizer_of(engine)
    if isinstance(request, TokenizePrompt):
        _check_model(engine, request.model)
        ids = await tokenizer.aencode(request.prompt)
    else:
        ids = await tokenizer.atokenize(request)
    texts = await tokenizer.aconvert_ids_to_tokens(ids) if request.return_token_strs else None
    return TokenizeResponse(count=len(ids), max_model_len=engine.status().max_model_len, tokens=ids, token_strs=texts)


async def detokenize(engine: ChatEngine, request: DetokenizeRequest) -> DetokenizeResponse:
    """Handle `/detokenize`. Raises the errors of `tokenize`."""
    tokenizer = tokenizer_of(engine)
    _check_model(engine, request.model)
    return DetokenizeResponse(prompt=await tokenizer.adecode(request.tokens))


def tokenizer_of(engine: ChatEngine) -> SupportsTokenization:
    """Return the engine if it has a tokenizer; otherwise raise HTTPException with status 501."""
    if not isinstance(engine, SupportsTokenization):
        raise HTTPException(
            501, "This server forwards requests to another one and has no tokenizer. Send the request to that server."
        )
    return engine


def _check_model(engine: ChatEngine, name: str | None) -> None:
    status = engine.status()
    if name not in {None, status.model, DEFAULT_MODEL, *(lora.name for lora in status.loras)}:
        raise ModelNotFound(f"The model {name!r} is not served here. Use {status.model!r}.", param="model")
