"""The decoder's contract: token ids, visual tokens and positions go in, one token after the other comes out."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from ..errors import ContextLengthExceeded, DecoderFailed, InvalidParameter
from ..protocol.sampling import SAMPLING_PARAMETERS, Sampling

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ..config import EngineConfig
    from ..kernels.choice import KernelSelector
    from ..models.interface import VisualTokens
    from ..models.spec import ModelSpec

__all__ = [
    "GUIDED_DECODING",
    "SAMPLING_PARAMETERS",
    "CompiledGrammar",
    "DecodeRequest",
    "Decoder",
    "DecoderFactory",
    "DecoderStats",
    "DecoderSupport",
    "FinishReason",
    "GrammarMatcher",
    "Sampling",
    "Token",
    "VisualSpan",
    "check_request",
]

logger: logging.Logger = logging.getLogger(__name__)

FinishReason = Literal["stop", "length"]

GUIDED_DECODING = "guide"
"""What a decoder supported_params that bars, at each step, the tokens that a grammar does not allow."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VisualSpan:
    """Where visual tokens of one picture or video stand in the prompt.

    Attributes:
        start: index of the first placeholder token.
        tokens: all of the item's visual tokens.
        row: the first one of `tokens.embedding` that stands here.
        length: how many they are; all that follow by default.
    """

    start: int
    tokens: VisualTokens
    row: int = 0
    length: int | None = None

    @property
    def stop(self) -> int:
        """Index behind the last placeholder token."""
        return self.start + (len(self.tokens.embedding) - self.row if self.length is None else self.length)


class GrammarMatcher(Protocol):
    """One answer's way through a grammar; used by one thread at a time."""

    def allowed_tokens(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next: bool, one for each row of the output layer, at least one of them true.

        Tokens that end an answer are among them where the grammar may end, and alone where it must. Asking changes
        nothing.

        Raises:
            DecoderFailed: to go on from here would take more work than the limits allow.
        """

    def accept_token(self, token: int) -> None:
        """Go on behind a token that was allowed."""


class CompiledGrammar(Protocol):
    """What an answer has to follow, token by token; any number of answers may do so at once."""

    def new_matcher(self) -> GrammarMatcher:
        """A new way through it, from the start."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DecodeRequest:
    """One answer to decode.

    Attributes:
        id: the request's id, for logs.
        token_ids: int64 [length]; placeholders included.
        positions: int64 [3, length]: time, height and width (M-RoPE). Answer tokens go on at the largest position + 1.
        spans: visual tokens in prompt order; they replace the embeddings of their placeholders.
        sampling: with `max_tokens` set, such that prompt and answer fit `max_model_len`.
        guide: bars tokens at each step; None leaves the answer free. Only decoders that honour `GUIDE` get one.
        salt: what is kept of the prompt under it is found under it alone.
    """

    id: str
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    spans: tuple[VisualSpan, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    grammar: CompiledGrammar | None = None
    cache_salt: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """One decoded token.

    Attributes:
        id: its id; the token that ends an answer is yielded too, with `finish="stop"`.
        logprob: natural logarithm of its probability before temperature and truncation; None unless asked for.
        top: the most likely tokens of this step as (id, logprob), most likely first; empty unless asked for.
        finish: why the answer ends with this token; None while it goes on.
        cached: prompt tokens that were read from a prefix cache; set on the first token.
    """

    id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0


class RequestNotStarted(Exception):
    """The decoder died before it began with the request, which another one can take: the supervisor sees to that."""


class Decoder(Protocol):
    """Decodes prompts into tokens, many at a time.

    Attributes:
        name: as listed by `dashinfer-vlm plugins` and `/health`.
        max_model_len: tokens that prompt and answer may have together here; at most the model's.
        supported_params: the members of `SAMPLING_PARAMETERS` that it supports, and `GUIDED_DECODING` if it can mask
            tokens; the engine rejects requests that need more.
        unsupported_vision_reason: why it accepts no images and videos, and the next step; the engine rejects requests
            with media. Empty if it accepts them.
        trouble: why it cannot decode at all any more, though it was started; empty while it can. For `/health`.

    One that counts what it does says so by a method `snapshot() -> DecoderStats`.
    """

    name: str
    max_model_len: int
    supported_params: frozenset[str]
    unsupported_vision_reason: str

    @property
    def fatal_error(self) -> str: ...

    async def start(self) -> None:
        """Load what is needed and be ready for `decode`.

        Raises:
            SetupError: it cannot run here; the message says what to mend.
        """

    async def close(self) -> None:
        """Free everything; running requests end with EngineClosed. Closing twice is allowed.

        Raises:
            DecoderFailed: it hangs; only the end of the process frees what it holds.
        """

    def decode(self, request: DecodeRequest) -> AsyncGenerator[Token, None]:
        """Yield the answer's tokens; the last one carries `finish`.

        An async generator: closing it (`aclose`, or cancelling the task that reads it) stops the request within one
        step and frees all that it held.

        Raises:
            QueueFull: `max_waiting` requests wait already.
            ContextLengthExceeded: the request could never fit the memory for keys and values.
            DecoderFailed: the decoder died while the request ran.
            RequestNotStarted: it died before; it is in `trouble`.
            EngineClosed: the decoder was closed.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderStats:
    """What a decoder does and has done; zero for what it does not count.

    Attributes:
        running: requests that are decoded now.
        waiting: requests that wait for a place in the batch.
        kv_used: tokens' worth of memory for keys and values that running requests hold.
        kv_cached: tokens' worth that is kept for later requests.
        kv_size: tokens' worth that there is.
        started: requests that got a place.
        queue_seconds: that they waited for it, together.
        steps: passes of the language model.
        step_requests: requests that had a part in each, together.
        queries: prompts that were looked up in the prefix cache.
        hits: prompts of which a part was found there.
        cached_tokens: prompt tokens that were found there.
        preemptions: times that a running request had to wait again.
    """

    running: int = 0
    waiting: int = 0
    kv_used: int = 0
    kv_cached: int = 0
    kv_size: int = 0
    started: int = 0
    queue_seconds: float = 0.0
    steps: int = 0
    step_requests: int = 0
    queries: int = 0
    hits: int = 0
    cached_tokens: int = 0
    preemptions: int = 0

    @classmethod
    def of(cls, decoder: Decoder) -> DecoderStats:
        """What a decoder counts; nothing if it does not."""
        snapshot = getattr(decoder, "snapshot", cls)
        counted: DecoderStats = snapshot()
        return counted


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderSupport:
    """Whether a decoder can run here, and how well.

    Attributes:
        score: 0 if it cannot; among those that can, `decoder="auto"` takes the highest.
        reason: one sentence for the log and for `/health`; if it cannot run, what would have to change.
    """

    score: int
    reason: str


class DecoderFactory(Protocol):
    """Makes decoders; a plugin registers one by `register_decoders`.

    Attributes:
        name: what `EngineConfig.decoder` calls it.
        supported_params: as `Decoder.supported_params`, on the device that supports the most; reported before a model
            is loaded.
    """

    name: str
    supported_params: frozenset[str]

    def check_support(self, spec: ModelSpec, config: EngineConfig) -> DecoderSupport: ...

    def create(self, spec: ModelSpec, config: EngineConfig, kernels: KernelSelector) -> Decoder:
        """A decoder that is not started yet; called in a thread, since it may have to compile something.

        Args:
            spec: of the model.
            config: of the engine.
            kernels: chooses kernels, for decoders that compute with torch.
        """


def check_request(request: DecodeRequest, spec: ModelSpec, *, max_model_len: int) -> None:
    """Refuse what a decoder may rely on not to get.

    Raises:
        DecoderFailed: an invariant of DecodeRequest is broken; the log says which.
        InvalidParameter: a token id that does not exist; `param` names the option.
        ContextLengthExceeded: prompt and answer together exceed `max_model_len`.
    """
    fault = _fault(request, spec)
    if fault:
        logger.error("Request %s reached the decoder malformed: %s.", request.id, fault)
        raise DecoderFailed("The request reached the decoder malformed; the engine's log has the cause.")
    _check_ids("logit_bias", request.sampling.logit_bias, spec)
    _check_ids("stop_token_ids", request.sampling.stop_token_ids, spec)
    prompt, answer = len(request.token_ids), request.sampling.max_tokens or 0
    if prompt + answer > max_model_len:
        raise ContextLengthExceeded(
            f"The prompt's {prompt} tokens and an answer of up to {answer} exceed the {max_model_len} tokens "
            "that fit here. Shorten the messages, use smaller pictures, or lower max_tokens.",
            prompt_tokens=prompt,
            limit=max_model_len,
        )


def _check_ids(param: str, ids: Iterable[int], spec: ModelSpec) -> None:
    unknown = next((token for token in ids if not 0 <= token < spec.vocab_size), None)
    if unknown is not None:
        raise InvalidParameter(f"Token {unknown} does not exist. Use ids below {spec.vocab_size}.", param=param)


def _fault(request: DecodeRequest, spec: ModelSpec) -> str | None:
    """Which invariant of DecodeRequest is broken, if one is."""
    ids, length = request.token_ids, len(request.token_ids)
    if not length or ids.min() < 0 or ids.max() >= spec.vocab_size:
        return f"token_ids are empty or outside of the vocabulary of {spec.vocab_size}"
    if request.positions.shape != (3, length):
        return f"positions are {request.positions.shape}, not (3, {length})"
    if not request.sampling.max_tokens:
        return "sampling.max_tokens is not set"
    end = 0
    for span in request.spans:
        shape = tuple(span.tokens.embedding.shape)
        if len(shape) != 2 or shape[1] != spec.visual_width:
            return f"visual tokens are {shape}, not (rows, {spec.visual_width})"
        if not 0 <= span.row < span.row + span.stop - span.start <= shape[0]:
            return (
                f"a span at {span.start} takes rows from {span.row} on of {shape[0]} visual tokens, which are too few"
            )
        if span.start < end or span.stop > length:
            return f"a span of {shape[0]} visual tokens at {span.start} is outside of the prompt or on top of another"
        end = span.stop
    return None
