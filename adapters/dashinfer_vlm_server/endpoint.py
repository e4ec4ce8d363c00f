"""Routes with their OpenAPI descriptions, and what the middleware does with their requests."""

from __future__ import annotations

import asyncio
import http
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.routing import BaseRoute, Match, WebSocketRoute
from starlette.websockets import WebSocket

from .query import log_unknown, query_names

if TYPE_CHECKING:
    from openai.types import Completion, CompletionChoice
    from openai.types.chat import ChatCompletion
    from openai.types.chat.chat_completion import Choice
    from starlette.types import Receive, Scope, Send

Responses: TypeAlias = dict[int | str, dict[str, Any]]
"""Descriptions of responses by status, in OpenAPI's format; `model` is the model of the body."""

ENGINE_STATUSES = (400, 401, 403, 404, 408, 413, 415, 429, 500, 501, 503, 504)
"""The statuses of errors of endpoints that read a body and use the engine."""

PLAIN_STATUSES = (401, 403, 404, 500)
"""The statuses of errors of endpoints that do neither."""


BATCH = 256
"""Number of tokens whose log probabilities are serialized at a time, in up to 10 ms."""

REF = "#/components/schemas/{model}"


class ErrorObject(BaseModel):
    """An error; `param` names the field of the request that caused it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """OpenAI's error body."""

    error: ErrorObject


class PromptUsage(BaseModel):
    """The tokens of all prompts of a request that generates none."""

    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, prompt_tokens: Sequence[int]) -> PromptUsage:
        total = sum(prompt_tokens)
        return cls(prompt_tokens=total, total_tokens=total)


class Endpoint(APIRoute):
    """A route of the server. One for GET supports HEAD too (RFC 9110, 9.1); the HTTP server omits the body.

    Args:
        path: the path, which can have parameters.
        handler: a function with the request, or the parameters of the path, that returns the response.
        method: the method.
        body: the models that the body must match one of.
        response: the model of the body of a response with status 200.
        errors: statuses of errors.
        error_body: returns the body of an error; None for OpenAI's.
        responses: descriptions of other responses.
        public: whether it requires no API key.
        x_api_key: whether the key may be in the header `X-Api-Key`, too.
        any_host: whether it accepts any `Host` on a server without API keys, as process supervisors need.
        generates: whether its requests use tokens.
        limited: whether its POST requests count for the limit of concurrent requests of an API key.
        quiet: whether it is polled every few seconds, so that its requests are logged at level DEBUG.
        include_in_schema: whether the OpenAPI document describes it.
    """

    def __init__(
        self,
        path: str,
        handler: Callable[..., Coroutine[Any, Any, Response]],
        *,
        method: Literal["DELETE", "GET", "POST"] = "GET",
        body: Sequence[type[BaseModel]] = (),
        response: type[BaseModel] | None = None,
        errors: Sequence[int] = (),
        error_body: Callable[[Exception], Mapping[str, Any]] | None = None,
        responses: Responses | None = None,
        public: bool = False,
        x_api_key: bool = False,
        any_host: bool = False,
        generates: bool = False,
        limited: bool = True,
        quiet: bool = False,
        include_in_schema: bool = True,
    ) -> None:
        methods: list[str] = ["GET", "HEAD"] if method == "GET" else [method]
        super().__init__(path, handler, methods=methods, response_model=None, include_in_schema=include_in_schema)
        self._query_names = query_names(self)
        self.method = method
        self.body_models = body
        self.error_body = error_body
        self.public = public
        self.x_api_key = x_api_key
        self.any_host = any_host
        self.generates = generates
        self.limited = limited
        self.quiet = quiet
        described: Responses = {200: {"model": response}} if response else {}
        error_model = {} if error_body else {"model": ErrorBody}
        described |= {status: {**error_model, "description": http.HTTPStatus(status).phrase} for status in errors}
        self._documented = partial(
            APIRoute,
            path,
            handler,
            methods=[method],
            response_model=None,
            include_in_schema=include_in_schema,
            responses=described | (responses or {}),
            openapi_extra=_describe_body(body) if body else None,
        )

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        log_unknown(scope, self._query_names)
        await super().handle(scope, receive, send)

    def documented(self) -> APIRoute:
        """Return the route for the OpenAPI document: without HEAD, and with the models of its responses.

        FastAPI builds a validator for each model. That would take most of the time of creating an application, and no
        response is validated.
        """
        return self._documented()


post = partial(Endpoint, method="POST", errors=ENGINE_STATUSES)
"""Creates an endpoint that reads a body and uses the engine."""


class WebSocketEndpoint(WebSocketRoute):
    """A route of the server for WebSockets, at the path of an `Endpoint`.

    Args:
        path: the path.
        handler: serves a connection, from the handshake on.
    """

    def __init__(self, path: str, handler: Callable[[WebSocket], Coroutine[Any, Any, None]]) -> None:
        super().__init__(path, handler)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        log_unknown(scope, frozenset())
        await super().handle(scope, receive, send)


def _describe_body(models: Sequence[type[BaseModel]]) -> dict[str, Any]:
    refs = [{"$ref": REF.format(model=model.__name__)} for model in models]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def find_endpoint(routes: Sequence[BaseRoute], scope: Scope) -> Endpoint | None:
    """Return the endpoint of a request, or one for its path and another method, if one exists.

    That of a WebSocket is the one for POST, which has the same name in logs and the same form of errors.
    """
    if scope["type"] == "websocket":
        if not any(isinstance(route, WebSocketEndpoint) and route.matches(scope)[0] is Match.FULL for route in routes):
            return None
        scope = {**scope, "type": "http", "method": "POST"}
    for match in (Match.FULL, Match.PARTIAL):
        for route in routes:
            if isinstance(route, Endpoint) and route.matches(scope)[0] is match:
                return route
    return None


def json_response(body: BaseModel, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Serialize as OpenAI does: fields that were set to None are null, fields that were not set are omitted."""
    text = body.model_dump_json(exclude_unset=True)
    return Response(text, status_code=status, headers=headers, media_type="application/json")


async def completion_response(completion: ChatCompletion | Completion) -> Response:
    """Serialize a completion; in a thread if it has log probabilities, which can be many megabytes."""
    if all(choice.logprobs is None for choice in completion.choices):
        return json_response(completion)
    return Response(await asyncio.to_thread(_completion_json, completion), media_type="application/json")


def _completion_json(completion: ChatCompletion | Completion) -> bytes:
    # A single call of pydantic would not let other threads run until its end.
    choices = map(_choice_json, completion.choices)
    others = completion.model_dump_json(exclude_unset=True, exclude={"choices"}).encode()
    return others[:-1] + b',"choices":[' + b",".join(choices) + b"]}"


def _choice_json(choice: Choice | CompletionChoice) -> bytes:
    fields = choice.model_dump_json(exclude_unset=True, exclude={"logprobs"}, warnings=False).encode()
    if choice.logprobs is None:
        return fields[:-1] + b',"logprobs":null}'
    lists: list[bytes] = []
    for name, entries in choice.logprobs:
        batches = (to_json(entries[start : start + BATCH])[1:-1] for start in range(0, len(entries or ()), BATCH))
        lists.append(b'"%s":' % name.encode() + (b"null" if entries is None else b"[" + b",".join(batches) + b"]"))
    return fields[:-1] + b',"logprobs":{' + b",".join(lists) + b"}}"
