"""The face of the decoder: it checks requests, and yields in the caller's event loop what the worker's thread
decodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable

from dashinfer_vlm_core.config import MIB, EngineConfig
from dashinfer_vlm_core.decoder import SAMPLING_PARAMETERS, DecodeRequest, Token
from dashinfer_vlm_core.errors import ConfigError, ContextLengthExceeded, DecoderFailed, EngineClosed, InvalidParameter
from dashinfer_vlm_core.model import ModelSpec
from dashinfer_vlm_core.qwen2_vl.config import read_text_config
from dashinfer_vlm_core.qwen2_vl.placement import resolve_device, resolve_dtype
from dashinfer_vlm_core.qwen2_vl.weights import Weights, torch_dtype

from .attention import KVCache
from .model import TextModel
from .runner import Runner
from .scheduler import Run, Scheduler, Stats
from .worker import Mailbox, Worker

logger = logging.getLogger(__name__)

LEAST_TOKENS = 16


class TorchDecoder:
    """Decodes with continuous batching; implements `dashinfer_vlm_core.decoder.Decoder`.

    What is guaranteed: a request's tokens depend on its own content alone, up to the rounding of matrix products, whose
    order of summation may change with the number of rows. In float32 that is around 1e-6 of a logit, so that greedy
    answers are the same alone and in any company wherever the best two logits differ by more; the same seed gives the
    same text unless a random number falls that close to a border of the cumulative distribution.
    """

    name = "torch"
    honours = SAMPLING_PARAMETERS

    def __init__(self, spec: ModelSpec, config: EngineConfig) -> None:
        self._spec = spec
        self._config = config
        self._text = read_text_config(spec.folder)
        self._device = resolve_device(config.device)
        self._dtype = torch_dtype(resolve_dtype(config.dtype, spec.dtype, self._device))
        context = min(spec.max_model_len, config.max_model_len or spec.max_model_len)
        self._kv_tokens = self._affordable_tokens(context)
        self.max_model_len = min(context, self._kv_tokens)
        self._worker: Worker | None = None

    @property
    def stats(self) -> Stats:
        """Who runs and waits, and how much memory for keys and values is taken."""
        return self._worker.stats if self._worker else Stats(running=0, waiting=0, kv_used=0, kv_size=self._kv_tokens)

    async def start(self) -> None:
        if self._worker is None:
            runner = await asyncio.to_thread(self._load)
            self._worker = Worker(runner, self._scheduler())

    async def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker:
            await asyncio.to_thread(worker.stop)

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[Token, None]:
        worker = self._worker
        if worker is None:
            raise EngineClosed("The decoder is not running. Start the engine first.")
        self._check(request)
        run = Run.of(request, self._spec.tokens.stop)
        mailbox = Mailbox(asyncio.get_running_loop(), asyncio.Queue())
        worker.submit(run, mailbox)
        try:
            while True:
                reply = await mailbox.queue.get()
                if not isinstance(reply, Token):
                    raise reply
                yield reply
                if reply.finish:
                    return
        finally:
            worker.cancel(run)

    def _affordable_tokens(self, context: int) -> int:
        """Size of the KV pool: what the budget pays for, but no more than a full batch can use."""
        budget = self._config.kv_cache_mib
        tokens = budget * MIB // KVCache.bytes_per_token(self._text, self._dtype)
        if tokens < LEAST_TOKENS:
            fault = f"`kv_cache_mib` {budget} holds only {tokens} tokens of this model. Raise it."
            raise ConfigError(fault, param="kv_cache_mib")
        if tokens < context:
            logger.warning("kv_cache_mib=%d holds %d tokens, fewer than the context of %d.", budget, tokens, context)
        return min(tokens, context * self._config.max_batch_size)

    def _load(self) -> Runner:
        with Weights.open(self._spec.folder) as weights:
            model = TextModel(weights, self._text, device=self._device, dtype=self._dtype)
        return Runner(model, KVCache(self._text, self._kv_tokens, device=self._device, dtype=self._dtype))

    def _scheduler(self) -> Scheduler:
        return Scheduler(
            kv_tokens=self._kv_tokens,
            max_batch_size=self._config.max_batch_size,
            max_waiting=self._config.max_waiting,
            prefill_chunk=self._config.prefill_chunk,
        )

    def _check(self, request: DecodeRequest) -> None:
        """Refuse what would fail in a step, where it would cost the whole batch a second try."""
        fault = _fault(request, self._spec)
        if fault:
            logger.error("Request %s reached the decoder malformed: %s.", request.id, fault)
            raise DecoderFailed("The request reached the decoder malformed; the engine's log has the cause.")
        self._check_ids("logit_bias", request.sampling.logit_bias)
        self._check_ids("stop_token_ids", request.sampling.stop_token_ids)
        prompt, answer = len(request.token_ids), request.sampling.max_tokens or 0
        if prompt + answer > self.max_model_len:
            raise ContextLengthExceeded(
                f"The prompt's {prompt} tokens and an answer of up to {answer} exceed the {self.max_model_len} tokens "
                "that fit here. Shorten the messages, use smaller pictures, or lower max_tokens.",
                prompt_tokens=prompt,
                limit=self.max_model_len,
            )

    def _check_ids(self, param: str, ids: Iterable[int]) -> None:
        unknown = next((token for token in ids if not 0 <= token < self._spec.vocab_size), None)
        if unknown is not None:
            fault = f"Token {unknown} does not exist. Use ids below {self._spec.vocab_size}."
            raise InvalidParameter(fault, param=param)


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
        if len(shape) != 2 or shape[1] != spec.hidden_size:
            return f"visual tokens are {shape}, not (rows, {spec.hidden_size})"
        if span.start < end or span.stop > length:
            return f"a span of {shape[0]} visual tokens at {span.start} is outside of the prompt or on top of another"
        end = span.stop
    return None
