"""Shipped fakes, for tests of adapters and of applications: the real engine, with a decoder that plays a script.

    with scripted_engine("A red circle.", QueueFull("Busy.")) as engine:
        engine.chat({"messages": [{"role": "user", "content": "What is this?"}]})

Requests are parsed, media decoded, prompts built and answers counted as always; only the language model is played.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

import tokenizers

from .config import EngineConfig
from .decoders import GUIDED_DECODING, DecodeRequest, DecoderFactory, DecoderSupport, FinishReason, Token
from .engine import Engine
from .errors import DecoderFailed, EngineClosed
from .hookspecs import hookimpl
from .plugins import Registry, load_plugins
from .protocol.sampling import SAMPLING_PARAMETERS

if TYPE_CHECKING:
    from .kernels.choice import KernelSelector
    from .models.spec import ModelSpec

EVERYTHING = SAMPLING_PARAMETERS | {GUIDED_DECODING}
Answer = str | Exception | Callable[[DecodeRequest], str]


class Script:
    """What a scripted decoder plays, and what it was asked.

    Args:
        answers: one per request, in order; the last one is repeated. A string is the answer, an exception is raised in
            its place, a function makes the answer from the request.
        delay: seconds before each token.
        supported_params: what the decoder supports; everything by default. A script is not sampled, so sampling
            options have no effect; a response that violates the requested format ends with `DecoderFailed`.

    Attributes:
        requests: every request that came, in order.
        running: number of requests that are being decoded now.
    """

    def __init__(self, *answers: Answer, delay: float = 0.0, supported_params: frozenset[str] = EVERYTHING) -> None:
        if not answers:
            raise ValueError("a script needs at least one answer")
        self._answers = answers
        self.delay = delay
        self.supported_params: frozenset[str] = supported_params
        self.requests: list[DecodeRequest] = []
        self.running = 0

    def next(self, request: DecodeRequest) -> str:
        answer = self._answers[min(len(self.requests), len(self._answers) - 1)]
        self.requests.append(request)
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, str) else answer(request)


class ScriptedDecoder:
    """A decoder that plays a script; it implements the protocol `Decoder`."""

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
        """Nothing has to be loaded."""

    async def close(self) -> None:
        self._closed = True

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[Token, None]:
        ids = self._ids(self._script.next(request), request)
        self._follow(ids, request)
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

    def _follow(self, ids: list[int], request: DecodeRequest) -> None:
        if request.grammar is None:
            return
        walk = request.grammar.new_matcher()
        for index, token in enumerate(ids):
            if not walk.allowed_tokens()[token]:
                right = self._tokenizer.decode(ids[:index])
                raise DecoderFailed(f"The script leaves the format asked for behind {right!r}.")
            walk.accept_token(token)

    def _token(self, token: int, request: DecodeRequest, *, last: bool) -> Token:
        """A script is certain of each token: its probability is 1, and there are no alternatives beside it."""
        finish: FinishReason | None = ("stop" if token in self._spec.tokens.stop else "length") if last else None
        wanted = request.sampling.logprobs
        if wanted is None:
            return Token(id=token, finish_reason=finish)
        return Token(id=token, logprob=0.0, top_logprobs=((token, 0.0),)[:wanted], finish_reason=finish)


class ScriptedPlugin:
    """A plugin that registers the decoder `scripted`."""

    name = "scripted"

    def __init__(self, script: Script) -> None:
        self._script = script
        self.supported_params: frozenset[str] = script.supported_params

    @hookimpl
    def register_decoders(self, register: Callable[[DecoderFactory], None]) -> None:
        register(self)

    def check_support(self, spec: ModelSpec, config: EngineConfig) -> DecoderSupport:
        return DecoderSupport(score=1, reason="a script is played")

    def create(self, spec: ModelSpec, config: EngineConfig, kernels: KernelSelector) -> ScriptedDecoder:
        return ScriptedDecoder(self._script, spec=spec, config=config)


def scripted_registry(script: Script) -> Registry:
    """The installed plugins, and the decoder `scripted` that plays `script`."""
    registry = load_plugins()
    registry.add_plugin(ScriptedPlugin(script), name="scripted")
    return registry


def scripted_engine(
    *answers: Answer, delay: float = 0.0, supported_params: frozenset[str] = EVERYTHING, **options: Any
) -> Engine:
    """An engine, not started yet, whose decoder plays `answers`; `options` are those of EngineConfig."""
    script = Script(*answers, delay=delay, supported_params=supported_params)
    return Engine(EngineConfig(**{"decoder": "scripted", **options}), registry=scripted_registry(script))
