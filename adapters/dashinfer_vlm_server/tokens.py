"""`/tokenize` and `/detokenize`, in the shapes of vLLM's server."""

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


class Tokenized(BaseModel):
    """Token ids of a prompt, and if they were asked for, the tokens as the vocabulary spells them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    """The text of token ids."""

    prompt: str


@runtime_checkable
class Tokenizing(Protocol):
    """An engine in this process, whose tokenizer can be used; one behind an address has none."""

    async def atokenize(self, request: Request) -> list[int]: ...

    async def aencode(self, text: str) -> list[int]: ...

    async def adecode(self, ids: Sequence[int]) -> str: ...

    async def aconvert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]: ...


async def tokenize(engine: ChatEngine, request: TokenizePrompt | TokenizeChat) -> Tokenized:
    """Answer `/tokenize`.

    Raises:
        HTTPException: 501, the engine has no tokenizer.
        RequestError, EngineError: as the engine.
    """
    tokenizing = _tokenizing(engine)
    if isinstance(request, TokenizePrompt):
        _check_model(engine, request.model)
        ids = await tokenizing.aencode(request.prompt)
    else:
        ids = await tokenizing.atokenize(request)
    texts = await tokenizing.aconvert_ids_to_tokens(ids) if request.return_token_strs else None
    return Tokenized(count=len(ids), max_model_len=engine.status().max_model_len, tokens=ids, token_strs=texts)


async def detokenize(engine: ChatEngine, request: DetokenizeRequest) -> Detokenized:
    """Answer `/detokenize`. Raises as `tokenize`."""
    tokenizing = _tokenizing(engine)
    _check_model(engine, request.model)
    return Detokenized(prompt=await tokenizing.adecode(request.tokens))


def _tokenizing(engine: ChatEngine) -> Tokenizing:
    if not isinstance(engine, Tokenizing):
        raise HTTPException(501, "This server hands requests on to another one, and has no tokenizer: ask that one.")
    return engine


def _check_model(engine: ChatEngine, name: str | None) -> None:
    served = engine.status().model
    if name not in {None, served, DEFAULT_MODEL}:
        raise ModelNotFound(f"The model {name!r} is not served here: ask for {served!r}.", param="model")
