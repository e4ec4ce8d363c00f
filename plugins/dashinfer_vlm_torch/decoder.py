"""The PyTorch decoder: checks requests, and yields the tokens of the worker's thread in the caller's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncGenerator
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch

from dashinfer_vlm_core.config import MIB, EngineConfig
from dashinfer_vlm_core.decoders import DecodeRequest, DecoderStats, Pooled, Token, check_request
from dashinfer_vlm_core.errors import ConfigError, EngineClosed
from dashinfer_vlm_core.kernels.choice import KernelSelector
from dashinfer_vlm_core.kernels.devices import is_cpu
from dashinfer_vlm_core.kernels.linears import supported_bits
from dashinfer_vlm_core.kernels.quantization import INT4, INT8, Quantization
from dashinfer_vlm_core.kernels.types import Int8CacheAttention, Kernels
from dashinfer_vlm_core.models.eagle import EagleSpec
from dashinfer_vlm_core.models.formats.detection import weight_memory
from dashinfer_vlm_core.models.lora import LoraWeights
from dashinfer_vlm_core.models.memory import CacheSize, kv_budget_mib, memory_limit, weight_file_bytes
from dashinfer_vlm_core.models.placement import resolve_placement
from dashinfer_vlm_core.models.spec import ModelSpec
from dashinfer_vlm_core.models.weights import Weights

from .decode_graphs import DecodeGraphs, record_graphs, step_shapes
from .drafter import Drafter
from .drafters import create_mtp_drafter, load_eagle_drafter, load_model_drafter
from .kv_cache import KVCache
from .lora import TextLora
from .model import TextModel
from .runner import ModelRunner
from .scheduler import Scheduler
from .sequence import SequenceState
from .settings import SUPPORTED_PARAMS, TorchOptions
from .state_cache import create_states
from .state_manager import count_sequences
from .text_model_reader import open_converted
from .worker import OutputQueue, Worker

logger: logging.Logger = logging.getLogger(__name__)

MIN_KV_TOKENS = 16
"""Minimum size of the KV pool: one block of the prefix cache. A smaller `kv_cache_mib` is rejected."""


class TorchDecoder:
    """Decodes with continuous batching; implements `dashinfer_vlm_core.decoders.Decoder`. Belongs to one event loop.

    Guarantee: a request's tokens depend only on its own content, up to the rounding of matrix products, whose order of
    summation may change with the number of rows. In float32 the difference is around 1e-6 of a logit. Greedy outputs
    are therefore the same alone and in any batch wherever the two largest logits differ by more. The same seed gives
    the same text unless a random number is that close to a boundary of the cumulative distribution.
    """

    name = "torch"
    supported_params: frozenset[str] = SUPPORTED_PARAMS
    unsupported_vision_reason = ""

    def __init__(self, spec: ModelSpec, config: EngineConfig, kernels: KernelSelector) -> None:
        self._spec = spec
        self._config = config
        options = config.options_of(TorchOptions)
        self._speculates = spec.pooling is None and options.speculative_method != "none"
        self._draft = spec.draft
        # Without drafts, the head for multi-token prediction needs no memory.
        uses_mtp = self._speculates and options.uses_mtp and self._draft is None
        self._text = spec.text if uses_mtp else replace(spec.text, mtp_layer=None)
        self._pools_tokens = spec.pooling is not None and spec.pooling.pools_tokens
        self._device, self._dtype = resolve_placement(config, spec)
        self._kernel_selector = kernels
        self._kernels = kernels.choose(self._device, self._dtype, self._text)
        self._quantization = _text_quantization(config, self._kernels, self._device)
        self._cache_dtype = _cache_dtype(config, self._dtype)
        context = min(spec.max_model_len, config.max_model_len or spec.max_model_len)
        budget = self._kv_budget()
        self._cache_size = CacheSize.of(
            self._text,
            self._draft.text if self._draft else None,
            mib=budget,
            itemsize=self._dtype.itemsize,
            cache_itemsize=self._cache_dtype.itemsize,
        )
        self._kv_tokens = self._kv_pool_tokens(budget, context)
        self.max_model_len: int = min(context, self._kv_tokens)
        self._worker: Worker | None = None
        self._runner: ModelRunner | None = None
        self._loras: WeakKeyDictionary[LoraWeights, TextLora] = WeakKeyDictionary()
        self._lora_lock = asyncio.Lock()

    def snapshot(self) -> DecoderStats:
        if self._worker:
            return self._worker.stats
        return DecoderStats(kv_size=self._kv_tokens, states_size=self._cache_size.states)

    @property
    def fatal_error(self) -> str:
        return self._worker.fatal_error if self._worker else ""

    async def start(self) -> None:
        if self._worker is None:
            self._runner = await asyncio.to_thread(self._load)
            loop = asyncio.get_running_loop()
            step_timeout = self._config.limits.step_timeout
            self._worker = Worker(self._runner, self._scheduler(), loop, step_timeout=step_timeout)

    async def close(self) -> None:
        worker = self._worker
        self._worker = None
        self._runner = None
        self._loras.clear()
        if worker:
            await asyncio.to_thread(worker.stop)

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[Token, None]:
        async with contextlib.aclosing(self._outputs(request)) as outputs:
            async for output in outputs:
                assert isinstance(output, Token)
                yield output
                if output.finish_reason:
                    return

    async def pool(self, request: DecodeRequest) -> Pooled:
        async with contextlib.aclosing(self._outputs(request)) as outputs:
            output = await anext(outputs)
            assert isinstance(output, Pooled)
            return output

    def forget(self, cache_salt: str) -> None:
        if self._worker:
            self._worker.forget(cache_salt)

    async def _outputs(self, request: DecodeRequest) -> AsyncGenerator[Token | Pooled, None]:
        worker = self._worker
        if worker is None:
            raise EngineClosed(_NOT_RUNNING)
        check_request(request, self._spec, max_model_len=self.max_model_len)
        lora = await self._text_lora(request.lora) if request.lora else None
        sequence = SequenceState(request, self._spec.tokens.stop, lora, pools_tokens=self._pools_tokens)
        output_queue = OutputQueue()
        worker.submit(sequence, output_queue)
        try:
            while True:
                output = await output_queue.get()
                if isinstance(output, Exception):
                    raise output
                yield output
        finally:
            worker.cancel(sequence)

    async def load_lora(self, lora: LoraWeights) -> None:
        """Prepare an adapter; it is freed when it is garbage-collected.

        Raises:
            CheckpointError: the adapter's file is damaged.
            ConfigError: the kernels do not support adapters.
        """
        await self._text_lora(lora)

    async def _text_lora(self, lora: LoraWeights) -> TextLora:
        async with self._lora_lock:
            loaded = self._loras.get(lora)
            if loaded is None:
                if self._runner is None:
                    raise EngineClosed(_NOT_RUNNING)
                loaded = await asyncio.to_thread(self._runner.load_lora, lora)
                self._loras[lora] = loaded
                mib = lora.num_bytes / MIB
                logger.info("LoRA adapter %r from %s: %.1f MiB in its file.", lora.name, lora.source, mib)
            return loaded

    def _kv_pool_tokens(self, budget: int, context: int) -> int:
        tokens = self._cache_size.tokens
        if tokens < MIN_KV_TOKENS:
            raise ConfigError(self._too_small(budget), param="kv_cache_mib")
        if tokens < context:
            logger.warning(
                "kv_cache_mib=%d holds %d tokens, fewer than the context of %d. Increase it to accept longer prompts.",
                budget,
                tokens,
                context,
            )
        return min(tokens, context * self._config.max_batch_size)

    def _too_small(self, budget: int) -> str:
        size = self._cache_size
        if not size.states:
            return f"`kv_cache_mib` {budget} holds only {size.tokens} tokens of this model. Increase it."
        least = math.ceil((2 * size.state_bytes + MIN_KV_TOKENS * size.token_bytes) / MIB)
        return (
            f"`kv_cache_mib` {budget} does not hold one sequence of this model, which needs two recurrent states of"
            f" {size.state_bytes / MIB:.1f} MiB and its keys and values. Set it to at least {least}."
        )

    def _kv_budget(self) -> int:
        """Size of the KV cache in MiB: `kv_cache_mib`, whose default fits into the memory of the machine on a CPU.

        The memory that is free at the moment does not matter: the context would change from start to start.
        """
        configured = self._config.kv_cache_mib
        memory = memory_limit() if is_cpu(self._device) else None
        weights = weight_file_bytes(self._spec.folder)
        weights += weight_file_bytes(self._draft.folder) if self._draft else 0
        budget = kv_budget_mib(self._config, weights=weights, memory=memory)
        if memory is not None and budget < configured:
            message = "KV cache of %d MiB instead of %d: the memory has %d MiB, and the files of the weights %d MiB."
            logger.warning(message, budget, configured, memory // MIB, weights // MIB)
        return budget

    def _load(self) -> ModelRunner:
        spec = self._spec
        part = "text with MTP head" if self._text.mtp_layer else "pooled text" if spec.pooling else "text"
        with (
            Weights(spec.folder, spec.tensor_renames, spec.quantization) as weights,
            open_converted(weights, self._config, self._kernels, part) as converted,
        ):
            _log_stored_weights(weights, self._kernels, self._dtype)
            model = TextModel(
                weights,
                self._text,
                self._kernels,
                device=self._device,
                dtype=self._dtype,
                quantization=self._quantization,
                cache_dtype=self._cache_dtype,
                pooling=spec.pooling,
                captured_layers=self._draft.target_layers if isinstance(self._draft, EagleSpec) else (),
                converted=converted,
            )
            _log_joined_weights(weights, self._dtype)
        self._log_loaded()
        on_cuda = self._device.startswith("cuda")
        rows = self._kv_tokens + on_cuda  # the last one is for the padding of CUDA graphs
        cache = KVCache(self._text, rows, device=self._device, dtype=self._cache_dtype)
        states = create_states(self._text, self._cache_size.states, device=self._device, dtype=self._dtype)
        graphs = self._record_graphs(model, cache) if on_cuda and not states else None
        return ModelRunner(model, cache, graphs, states, self._create_drafter(model, cache))

    def _log_loaded(self) -> None:
        weight_dtype = f"int{self._quantization.bits}" if self._quantization else _name(self._dtype)
        which = "Other weights" if self._spec.quantization else "Weights"
        logger.info("%s in %s on %s, with the kernels %r.", which, weight_dtype, self._device, self._kernels.name)
        logger.info("KV cache of %d tokens in %s.", self._kv_tokens, _name(self._cache_dtype))
        if states := self._cache_size.states:
            message = "%d recurrent states of %.1f MiB, two per sequence: up to %d sequences run at the same time."
            sequences = count_sequences(states, self._config.max_batch_size)
            logger.info(message, states, self._cache_size.state_bytes / MIB, sequences)
        if self._cache_dtype != self._dtype and not isinstance(self._kernels, Int8CacheAttention):
            message = "kv_cache_dtype=%s slows down decoding here: the kernels %r convert the cache in each step."
            logger.warning(message, self._config.kv_cache_dtype, self._kernels.name)

    def _create_drafter(self, model: TextModel, cache: KVCache) -> Drafter | None:
        if self._draft is None:
            return create_mtp_drafter(model, cache)
        if isinstance(self._draft, EagleSpec):
            return load_eagle_drafter(model, cache, self._draft, self._config, self._quantization)
        kernels = self._kernel_selector.choose(self._device, self._dtype, self._draft.text)
        return load_model_drafter(
            model, cache, self._draft, self._config, kernels=kernels, quantization=self._quantization
        )

    def _record_graphs(self, model: TextModel, cache: KVCache) -> DecodeGraphs | None:
        # Prompts are not replayed, and graphs do not return hidden states between layers.
        if not self._config.cuda_graphs or self._spec.pooling or isinstance(self._draft, EagleSpec):
            return None
        shapes = step_shapes(max_batch_size=self._config.max_batch_size, max_model_len=self.max_model_len)
        return record_graphs(model, cache, shapes)

    def _scheduler(self) -> Scheduler:
        return Scheduler(
            kv_tokens=self._kv_tokens,
            max_batch_size=self._config.max_batch_size,
            max_waiting=self._config.max_waiting,
            prefill_chunk=self._config.prefill_chunk,
            # Tokens whose keys and values are cached would have no hidden states.
            prefix_cache=self._config.prefix_cache and not self._pools_tokens,
            speculative=self._speculates,
            state_slots=self._cache_size.states,
        )


_NOT_RUNNING = "The decoder is not running. Start the engine first."


def _cache_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    return {"auto": dtype, "bfloat16": torch.bfloat16, "int8": torch.int8}[config.kv_cache_dtype]


def _log_stored_weights(weights: Weights, kernels: Kernels, dtype: torch.dtype) -> None:
    if weights.reader is None:
        return
    memory = weight_memory(
        weights.headers(), weights.reader, supported=supported_bits(kernels), itemsize=dtype.itemsize
    )
    level = logging.WARNING if memory.widened else logging.INFO
    logger.log(level, "Checkpoint in the format %s: %s.", memory.format, memory.describe(_name(dtype), kernels.name))


def _log_joined_weights(weights: Weights, dtype: torch.dtype) -> None:
    if weights.widened:
        logger.warning(
            "%d matrices, such as %s, are widened to %s: they are computed together with others that are quantized in"
            " another way.",
            len(weights.widened),
            weights.widened[0],
            _name(dtype),
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _text_quantization(config: EngineConfig, kernels: Kernels, device: str) -> Quantization | None:
    name = config.quantization
    if name == "none":
        return None
    if name == "int8" and kernels.supports_int8:
        return INT8
    if name == "int8" or not is_cpu(device):
        raise ConfigError(
            f"`quantization` {name!r} is not supported by the PyTorch decoder here: it supports int4 on a CPU, and int8"
            " for bfloat16 with the C kernels, on an x86 CPU with AVX2 and without `cpu_kernels` torch. Remove it, or"
            " use the decoder dashinfer on CUDA.",
            param="quantization",
        )
    if not kernels.supports_int4:
        logger.warning(
            "`quantization` %s saves no memory here: the kernels %r keep the rounded weights in the model's data type."
            " 4-bit weights are kept in 4 bits for bfloat16 with the C kernels, on an x86 CPU with AVX2.",
            name,
            kernels.name,
        )
    return INT4
