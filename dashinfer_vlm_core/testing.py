"""Test doubles for adapters and applications: the real engine with a scripted decoder.

    with scripted_engine("A red circle.", QueueFull("Busy.")) as engine:
        engine.chat({"messages": [{"role": "user", "content": "What is this?"}]})

Requests are parsed, media decoded, prompts built and tokens counted by the real code; only the language model is fake.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

import tokenizers

from .config import EngineConfig
from .decoders import GUIDED_DECODING, LORA, Decoder, DecodeRequest, DecoderFactory, DecoderSupport, FinishReason, Token
from .engine import Engine
from .errors import DecoderFailed, EngineClosed
from .hooks import hookimpl
from .plugins import Registry, load_plugins
from .protocol.sampling import SAMPLING_PARAMETERS

if TYPE_CHECKING:
    from .kernels.choice import KernelSelector
    from .models.lora import LoraWeights
    from .models.spec import ModelSpec

EVERYTHING = SAMPLING_PARAMETERS | {GUIDED_DECODING, LORA}
ScriptedResponse = str | Exception | Callable[[DecodeRequest], str]


class Script:
    """The responses of a scripted decoder, and the requests that it received; a plugin that registers this decoder.

    Args:
        responses: one per request, in order; the last one is repeated. A string is the completion, an exception is
            raised, and a function computes the completion from the request.
        delay: seconds before each token.
        supported_params: what the decoder supports; everything by default. A script is not sampled, so sampling
            parameters have no effect; a response that violates the requested format ends with `DecoderFailed`.

    Attributes:
        requests: all received requests, in order.
        running: number of requests that are being decoded.
    """

    name = "scripted"

    def __init__(
        self, *responses: ScriptedResponse, delay: float = 0.0, supported_params: frozenset[str] = EVERYTHING
    ) -> None:
        if not responses:
            raise ValueError("a script needs at least one response")
        self._responses = responses
        self.delay = delay
        self.supported_params: frozenset[str] = supported_params
        self.requests: list[DecodeRequest] = []
        self.running = 0

    @hookimpl
    def register_decoders(self, register: Callable[[DecoderFactory], None]) -> None:
        register(self)

    def check_support(self, spec: ModelSpec, config: EngineConfig) -> DecoderSupport:
        return DecoderSupport(score=1, reason="returns scripted responses")

    def create(self, spec: ModelSpec, config: EngineConfig, kernels: KernelSelector) -> ScriptedDecoder:
        return ScriptedDecoder(self, spec=spec, config=config)

    def next(self, request: DecodeRequest) -> str:
        response = self._responses[min(len(self.requests), len(self._responses) - 1)]
        self.requests.append(request)
        if isinstance(response, Exception):
            raise response
        return response if isinstance(response, str) else response(request)


class ScriptedDecoder(Decoder):
    """A `Decoder` that returns the responses of a script."""

    name = "scripted"
    unsupported_vision_reason = fatal_error = ""

    def __init__(self, script: Script, *, spec: ModelSpec, config: EngineConfig) -> None:
        self._script = script
        self._spec = spec
        self._closed = False
        self._tokenizer = tokenizers.Tokenizer.from_file(str(spec.folder / "tokenizer.json"))
        self.max_model_len: int = config.max_model_len or spec.max_model_len
        self.supported_params: frozenset[str] = script.supported_params

    async def start(self) -> None:
        """Do nothing: there is nothing to load."""

    async def close(self) -> None:
        self._closed = True

    async def load_lora(self, lora: LoraWeights) -> None:
        """Do nothing: adapters do not change a script."""

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[Token, None]:
        ids = self._ids(self._script.next(request), request)
        self._check_grammar(ids, request)
        self._script.running += 1
        try:
            for index, token in enumerate(ids):
                await asyncio.sleep(self._script.delay)
                if self._closed:
                    raise EngineClosed("The scripted decoder was closed.")
                yield self._token(token, request, last=index == len(ids) - 1)
        finally:
            self._script.running -= 1

    def _ids(self, text: str, request: DecodeRequest) -> list[int]:
        ids = [*self._tokenizer.encode(text, add_special_tokens=False).ids, self._spec.tokens.stop[0]]
        return ids[: request.sampling.max_tokens]

    def _check_grammar(self, ids: list[int], request: DecodeRequest) -> None:
        if request.grammar is None:
            return
        matcher = request.grammar.copy()
        for index, token in enumerate(ids):
            if not matcher.allowed_tokens()[token]:
                valid = self._tokenizer.decode(ids[:index])
                raise DecoderFailed(f"The scripted response violates the requested format after {valid!r}.")
            matcher.accept_token(token)

    def _token(self, token: int, request: DecodeRequest, *, last: bool) -> Token:
        finish: FinishReason | None = ("stop" if token in self._spec.tokens.stop else "length") if last else None
        num_logprobs = request.sampling.logprobs
        if num_logprobs is None:
            return Token(id=token, finish_reason=finish)
        return Token(id=token, logprob=0.0, top_logprobs=((token, 0.0),)[:num_logprobs], finish_reason=finish)


def scripted_registry(script: Script) -> Registry:
    """Return a registry with the installed plugins and the decoder `scripted`, which plays `script`."""
    registry = load_plugins()
    registry.add_plugin(script, name="scripted")
    return registry


def scripted_engine(
    *responses: ScriptedResponse, delay: float = 0.0, supported_params: frozenset[str] = EVERYTHING, **options: Any
) -> Engine:
    """Create an engine, not started yet, whose decoder returns `responses`; `options` are passed to EngineConfig."""
    script = Script(*responses, delay=delay, supported_params=supported_params)
    return Engine(EngineConfig(**{"decoder": "scripted", **options}), registry=scripted_registry(script))
