"""`POST /tokenize` and `POST /detokenize`, in vLLM's format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
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

from ...endpoint import ENGINE_STATUSES, Endpoint, json_response

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
    tokenizer = _Tokenizer(server.engine)

    async def tokenize(request: Request) -> Response:
        parsed = await server.read(request, parse_tokenize)
        return json_response(await server.run(request, tokenizer.tokenize(parsed)))

    async def detokenize(request: Request) -> Response:
        parsed = await server.read(request, DetokenizeRequest.parse)
        return json_response(await server.run(request, tokenizer.detokenize(parsed)))

    post = partial(Endpoint, method="POST", errors=ENGINE_STATUSES)
    return [
        post("/tokenize", tokenize, body=[TokenizePrompt, TokenizeChat], response=TokenizeResponse),
        post("/detokenize", detokenize, body=[DetokenizeRequest], response=DetokenizeResponse),
    ]


@dataclass(frozen=True)
class _Tokenizer:
    engine: ChatEngine

    async def tokenize(self, request: TokenizePrompt | TokenizeChat) -> TokenizeResponse:
        if isinstance(request, TokenizePrompt):
            self._check_model(request.model)
            ids = await self.engine.aencode(request.prompt)
        else:
            ids = await self.engine.atokenize(request)
        texts = await self.engine.aconvert_ids_to_tokens(ids) if request.return_token_strs else None
        max_model_len = self.engine.status().max_model_len
        return TokenizeResponse(count=len(ids), max_model_len=max_model_len, tokens=ids, token_strs=texts)

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse:
        self._check_model(request.model)
        return DetokenizeResponse(prompt=await self.engine.adecode(request.tokens))

    def _check_model(self, name: str | None) -> None:
        status = self.engine.status()
        if name not in {None, status.model, DEFAULT_MODEL, *(lora.name for lora in status.loras)}:
            raise ModelNotFound(f"The model {name!r} is not served here. Use {status.model!r}.", param="model")
