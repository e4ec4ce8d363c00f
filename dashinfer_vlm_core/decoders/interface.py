"""The interface of decoders: from token ids, visual tokens and positions to a stream of tokens."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from ..errors import ContextLengthExceeded, DecoderFailed, UnsupportedParameter
from ..protocol.sampling import Sampling

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ..config import EngineConfig
    from ..kernels.choice import KernelSelector
    from ..models.interface import VisualTokens
    from ..models.lora import LoraWeights
    from ..models.spec import ModelSpec

logger: logging.Logger = logging.getLogger(__name__)

FinishReason = Literal["stop", "length"]

GUIDED_DECODING = "guide"
"""The member of `supported_params` of a decoder that can mask, at each step, the tokens that a grammar does not
allow."""


POOLING = "pooling"
"""The member of `supported_params` of a decoder that pools the hidden states of a prompt."""


PREFIX_CACHE = "prefix_cache"
"""The member of `supported_params` of a decoder that keeps what it computes of prompts for those that begin alike."""


DRAFT_MODEL = "draft_model"
"""The member of `supported_params` of a decoder that verifies drafts of the model or head in `ModelSpec.draft`."""


LORA = "lora"
"""The member of `supported_params` of a decoder that applies LoRA adapters."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VisualSpan:
    """A run of placeholder tokens and the visual tokens of one image or video that replace it.

    Attributes:
        start: index of the first placeholder token.
        tokens: all of the item's visual tokens.
        row: the first row of `tokens.embedding` to use.
        length: the number of rows; all following rows by default.
    """

    start: int
    tokens: VisualTokens
    row: int = 0
    length: int | None = None

    @property
    def stop(self) -> int:
        """Index after the last placeholder token."""
        return self.start + (len(self.tokens.embedding) - self.row if self.length is None else self.length)


class GrammarMatcher(Protocol):
    """The state of one completion in a grammar; used by one thread at a time."""

    def allowed_tokens(self) -> npt.NDArray[np.bool_]:
        """Return the tokens that may come next: bool, one per row of the output layer, at least one of them true.

        Stop tokens are allowed where the grammar may end, and are the only allowed ones where it must end. The call
        does not change the state.

        Raises:
            DecoderFailed: continuing would exceed the grammar's limits.
        """

    def accept_token(self, token: int) -> None:
        """Advance by an allowed token."""

    def forced_tokens(self) -> list[int]:
        """Return the next tokens that are forced, up to the first one that is not; often empty.

        A token is forced if `allowed_tokens` would allow only this one after accepting those before it. The call does
        not change the state.
        """

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """Return how many of `tokens` could be accepted one after the other. The call does not change the state."""

    def copy(self) -> GrammarMatcher:
        """Return a matcher in the same state that advances independently; several threads may copy one matcher."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DecodeRequest:
    """One completion to decode.

    Attributes:
        id: the request's id, for logs.
        token_ids: int64 [length], including placeholders.
        positions: int64 [3, length]: time, height and width (M-RoPE). Output tokens continue at the largest
            position + 1.
        spans: visual tokens in prompt order; they replace the embeddings of their placeholders.
        response_boundaries: increasing indices of the tokens after the header of each message of the assistant, that of
            the generation prompt included, and after its end. Each depends on the tokens before it alone, and the
            prompt may end there.
        sampling: with `max_tokens` set, so that prompt and output fit `max_model_len`.
        grammar: masks tokens at each step, on a copy of this matcher, which several requests share; None for
            unconstrained output. Only decoders that support `GUIDED_DECODING` get one.
        cache_salt: separates prefix cache entries; a prompt cached with a salt is found only with the same salt.
        lora: the LoRA adapter to apply, which prefix cache entries depend on too. Only decoders that support `LORA`
            get one.
        pooling: whether the prompt is pooled, instead of completed; `sampling` and `grammar` are not used then.
        is_background: whether nobody waits for it, so that it does not count as a prompt in the statistics.
    """

    id: str
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    spans: tuple[VisualSpan, ...] = ()
    response_boundaries: tuple[int, ...] = ()
    pooling: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    grammar: GrammarMatcher | None = None
    cache_salt: str = ""
    lora: LoraWeights | None = None
    is_background: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """One decoded token.

    Attributes:
        id: its id; the stop token is yielded too, with `finish_reason="stop"`.
        logprob: natural logarithm of its probability before penalties, temperature and truncation; None unless
            requested.
        top_logprobs: the most likely tokens of this step as (id, logprob), most likely first; empty unless requested.
        finish_reason: why the output ends with this token; None if it continues.
        cached_tokens: prompt tokens taken from a prefix cache; set on the first token.
    """

    id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pooled:
    """What a pooling model computes from a prompt.

    Attributes:
        vector: float32 [hidden_size], the hidden state of the last token after the final norm, or [1], the logit of a
            score, or [tokens, size], the projected hidden states of all tokens; see `PoolingSpec.head`.
        cached_tokens: prompt tokens taken from a prefix cache.
    """

    vector: npt.NDArray[np.float32]
    cached_tokens: int = 0


class RequestNotStarted(Exception):
    """The decoder died before it started the request. The supervisor passes the request to the next decoder."""


class Decoder(Protocol):
    """Decodes prompts into tokens, many at a time. A class that inherits from it needs only what has no default.

    Attributes:
        name: as listed by `dashinfer-vlm plugins` and `/health`.
        max_model_len: most tokens of prompt and output together; at most the model's limit.
        supported_params: the members of `SAMPLING_PARAMETERS` that it supports, `GUIDED_DECODING` if it can mask
            tokens, `DRAFT_MODEL` if it uses drafts of a model, `LORA` if it applies adapters, `POOLING` if it runs
            pooling models, and `PREFIX_CACHE` if it keeps prompts; the engine rejects requests that need more.
        unsupported_vision_reason: why it accepts no images and videos, and the next step; the engine rejects requests
            with media. Empty if it accepts them.
        fatal_error: why it cannot decode although it was started; empty while it can. For `/health`.
    """

    name: str
    max_model_len: int
    supported_params: frozenset[str]
    unsupported_vision_reason: str

    @property
    def fatal_error(self) -> str: ...

    async def start(self) -> None:
        """Load the model and prepare for `decode`.

        Raises:
            SetupError: it cannot run here; the message contains the fix.
        """

    async def close(self) -> None:
        """Free everything; running requests end with EngineClosed. Closing twice is allowed.

        Raises:
            DecoderFailed: it hangs; only the end of the process frees its memory.
        """

    def decode(self, request: DecodeRequest) -> AsyncGenerator[Token, None]:
        """Yield the output tokens; the last one has a `finish_reason`.

        Closing the generator (`aclose`, or canceling the task that reads it) stops the request within one step and
        frees its memory.

        Raises:
            QueueFull: `max_waiting` requests are already waiting.
            ContextLengthExceeded: the request does not fit the KV cache.
            DecoderFailed: the decoder died while the request ran.
            RequestNotStarted: the decoder died before it started the request; see `fatal_error`.
            EngineClosed: the decoder was closed.
        """

    async def pool(self, request: DecodeRequest) -> Pooled:
        """Return what a pooling model computes from a prompt.

        Canceling the task stops the request within one step. Keys and values are kept for later prompts with the same
        salt, until `forget`, unless all tokens are pooled.

        Raises:
            QueueFull, ContextLengthExceeded, DecoderFailed, RequestNotStarted, EngineClosed: as `decode`.
            UnsupportedParameter: the decoder does not support `POOLING`, which is the default.
        """
        raise UnsupportedParameter(f"The decoder {self.name!r} does not pool hidden states.", param="task")

    def forget(self, cache_salt: str) -> None:
        """Free the keys and values that are kept of prompts with this salt; by default, none are."""
        return

    def snapshot(self) -> DecoderStats:
        """Return the statistics; zeros by default."""
        return DecoderStats()

    async def load_lora(self, lora: LoraWeights) -> None:
        """Prepare an adapter before its first request.

        Raises:
            SetupError: the adapter cannot be loaded.
            UnsupportedParameter: the decoder does not support `LORA`, which is the default.
        """
        raise UnsupportedParameter(f"The decoder {self.name!r} does not apply LoRA adapters.", param="lora")


@dataclass(kw_only=True, slots=True)
class DecoderStats:
    """Statistics of a decoder; zero for values that it does not measure.

    Attributes:
        running: sequences in the batch.
        waiting: sequences that wait for a slot in the batch.
        kv_used: size of the KV cache that running sequences use, in tokens.
        kv_cached: size that is kept for later sequences and evicted when it is needed, in tokens.
        kv_size: total size of the KV cache, in tokens.
        states_used: recurrent states of running sequences.
        states_cached: recurrent states that are kept for later sequences and evicted when one is needed.
        states_size: recurrent states that fit into the memory; 0 for models without such states.
        started: sequences that got a slot.
        queue_seconds: total time that they waited for it.
        steps: forward passes of the language model.
        step_requests: total number of sequences in these passes.
        queries: prompts that were prefilled completely.
        hits: prompts of which a part was taken from the prefix cache.
        cached_tokens: prompt tokens that were taken from the prefix cache.
        preemptions: number of times that a running sequence was preempted.
        draft_tokens: tokens that were drafted for verification in a forward pass (speculative decoding).
        accepted_tokens: drafted tokens that were equal to the sampled ones.
        forced_tokens: tokens that were the only ones a grammar allowed, and were added without sampling.
    """

    running: int = 0
    waiting: int = 0
    kv_used: int = 0
    kv_cached: int = 0
    kv_size: int = 0
    states_used: int = 0
    states_cached: int = 0
    states_size: int = 0
    started: int = 0
    queue_seconds: float = 0.0
    steps: int = 0
    step_requests: int = 0
    queries: int = 0
    hits: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    forced_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderSupport:
    """Whether a decoder can run a checkpoint here, with a score and a reason.

    Attributes:
        score: 0 if it cannot run; `decoder="auto"` selects the decoder with the highest score.
        reason: one sentence for the log and for `/health`; if it cannot run, what has to change.
        is_expected: whether the log states why it was not selected. False where few would want it, such as on a device
            that it is not meant for.
    """

    score: int
    reason: str
    is_expected: bool = True


class DecoderFactory(Protocol):
    """Creates decoders; a plugin registers a factory with `register_decoders`.

    Attributes:
        name: its name in `EngineConfig.decoder`.
        supported_params: as `Decoder.supported_params`, on the device that supports the most; reported before a model
            is loaded.
    """

    name: str
    supported_params: frozenset[str]

    def check_support(self, spec: ModelSpec, config: EngineConfig) -> DecoderSupport: ...

    def create(self, spec: ModelSpec, config: EngineConfig, kernels: KernelSelector) -> Decoder:
        """Create a decoder without starting it. This is called in a thread, since it may compile kernels.

        Args:
            spec: the model's spec.
            config: the engine's configuration.
            kernels: selects kernels, for decoders that compute with torch.
        """


def check_request(request: DecodeRequest, spec: ModelSpec, *, max_model_len: int) -> None:
    """Check the invariants on which decoders rely.

    Raises:
        DecoderFailed: an invariant of DecodeRequest is violated; it is logged.
        InvalidParameter: a token id does not exist; `param` names the option.
        ContextLengthExceeded: prompt and output together exceed `max_model_len`.
    """
    reason = _broken_invariant(request, spec)
    if reason:
        logger.error("The decoder received a malformed request %s: %s.", request.id, reason)
        raise DecoderFailed("The decoder received a malformed request; see the engine's log for the cause.")
    request.sampling.check_token_ids(spec.vocab_size)
    prompt = len(request.token_ids)
    output = 0 if request.pooling else request.sampling.max_tokens or 0
    if prompt + output > max_model_len:
        raise ContextLengthExceeded(
            f"The prompt's {prompt} tokens and a completion of up to {output} tokens exceed the limit of"
            f" {max_model_len}. Shorten the messages, use smaller images, or lower max_tokens.",
            prompt_tokens=prompt,
            limit=max_model_len,
        )


def _broken_invariant(request: DecodeRequest, spec: ModelSpec) -> str | None:
    ids = request.token_ids
    length = len(ids)
    if not length or ids.min() < 0 or ids.max() >= spec.vocab_size:
        return f"token_ids are empty or outside the vocabulary of {spec.vocab_size}"
    if request.positions.shape != (3, length):
        return f"positions are {request.positions.shape}, not (3, {length})"
    if request.pooling != (spec.pooling is not None):
        return f"the model's task is {spec.task}"
    if not request.pooling and not request.sampling.max_tokens:
        return "sampling.max_tokens is not set"
    end = 0
    for span in request.spans:
        shape = tuple(span.tokens.embedding.shape)
        if len(shape) != 2 or shape[1] != spec.visual_width:
            return f"visual tokens are {shape}, not (rows, {spec.visual_width})"
        if not 0 <= span.row < span.row + span.stop - span.start <= shape[0]:
            return f"a span at {span.start} needs rows from {span.row} on, but there are only {shape[0]} visual tokens"
        if span.start < end or span.stop > length:
            return f"a span of {shape[0]} visual tokens at {span.start} is outside the prompt or overlaps another"
        end = span.stop
    return None
