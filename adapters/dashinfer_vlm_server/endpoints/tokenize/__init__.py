"""`POST /tokenize` and `POST /detokenize`, in vLLM's format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from dashinfer_vlm_core.errors import ModelNotFound
from dashinfer_vlm_core.protocol import (
    DEFAULT_MODEL,
    DetokenizeRequest,
    TokenizeChat,
    TokenizePrompt,
    parse_tokenize,
)

from ...endpoint import Endpoint, json_response, post

if TYPE_CHECKING:
    from dashinfer_vlm_core.engine import ChatEngine

    from ...server_context import ServerContext


class TokenizeResponse(BaseModel):
    """Token IDs of a prompt and, if requested, the tokens as strings of the vocabulary."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    """The text of token IDs."""

    prompt: str


def create_endpoints(server: ServerContext) -> Sequence[Endpoint]:
    async def tokenize(request: Request) -> Response:
        parsed = await server.read(request, parse_tokenize)
        engine = server.engine.for_model(parsed.model or DEFAULT_MODEL)
        return json_response(await server.run(request, _tokenize(engine, parsed)))

    async def detokenize(request: Request) -> Response:
        parsed = await server.read(request, DetokenizeRequest.parse)
        engine = server.engine.for_model(parsed.model or DEFAULT_MODEL)
        _check_model(engine, parsed.model)
        text = await server.run(request, engine.adecode(parsed.tokens))
        return json_response(DetokenizeResponse(prompt=text))

    return [
        post("/tokenize", tokenize, body=[TokenizePrompt, TokenizeChat], response=TokenizeResponse),
        post("/detokenize", detokenize, body=[DetokenizeRequest], response=DetokenizeResponse),
    ]


async def _tokenize(engine: ChatEngine, request: TokenizePrompt | TokenizeChat) -> TokenizeResponse:
    if isinstance(request, TokenizePrompt):
        _check_model(engine, request.model)
        ids = await engine.aencode(request.prompt)
    else:
        ids = await engine.atokenize(request)
    texts = await engine.aconvert_ids_to_tokens(ids) if request.return_token_strs else None
    return TokenizeResponse(count=len(ids), max_model_len=engine.status().max_model_len, tokens=ids, token_strs=texts)


def _check_model(engine: ChatEngine, name: str | None) -> None:
    status = engine.status()
    known = (status.model, *status.aliases, *(lora.name for lora in status.loras))
    if name is not None and name not in {DEFAULT_MODEL, *known}:
        raise ModelNotFound.among(known, name)
