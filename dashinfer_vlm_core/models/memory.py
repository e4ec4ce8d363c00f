"""Estimate what a model needs of a machine's memory, and how fast it decodes.

Nothing is loaded or downloaded, and torch is not imported: the estimates follow from the configuration of a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..config import MIB, EngineConfig
from ..errors import CheckpointError
from ..kernels.topology import read_memory_limit
from ..text_spec import AttentionSpec, LayerSpec, MlpSpec, TextModelSpec

if TYPE_CHECKING:
    from ..kernels.tuned import WeightRates
    from ..kernels.types import Kernels, StepCost, WeightBits
    from .formats.interface import StoredBits
    from .spec import ModelSpec

MIN_KV_MIB = 256
"""The default size of the KV cache is not less, even if the weights need all memory."""

PROCESS_BYTES = 300 * MIB
"""Interpreter, libraries and media workers."""

BYTES_PER_TOKEN_ID = 800
"""What the tokenizer and the compiler of grammars need for each entry of the vocabulary."""

INT4_ROUNDED = 4.5 / 8
"""Bytes of a weight with `quantization` int4: a group of 16 inputs shares 8 bits."""

VISION_OUTPUTS = 5 / 12
"""Share of a vision encoder's weights whose products are added to hidden states, with MLPs of four times the width."""

INT4_STORED = 4.25 / 8
"""Bytes of a weight of a checkpoint with 4 bits: a group of 128 inputs shares 32 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """What determines the memory of a model.

    Attributes:
        text: the text model, as it is loaded.
        vision_weights: number of weights of the vision encoder.
        context: maximum number of tokens of a sequence.
        dtype: data type of the weights that are not quantized, as torch names it.
        file_bytes: size of the files with the weights.
        stored_bits: the bits of most layers if the checkpoint is quantized; None if it is not.
        draft: the text model, or the layer of the head, that drafts tokens; None without one.
        draft_bytes: size of the files with its weights, which take as much in memory at most.
        pools: whether hidden states are pooled, so that the output layer is not loaded; see also `keeps_outputs`.
    """

    text: TextModelSpec
    vision_weights: int
    context: int
    dtype: str
    file_bytes: int
    stored_bits: StoredBits | None = None
    draft: TextModelSpec | None = None
    draft_bytes: int = 0
    pools: bool = False

    @classmethod
    def of(cls, spec: ModelSpec, *, file_bytes: int | None = None, uses_mtp: bool = True) -> ModelSize:
        """Return the size of a checkpoint, whose files with weights need not exist if `file_bytes` is given.

        `uses_mtp` is that of the options of plugins.
        """
        loads_mtp = uses_mtp and spec.draft is None and spec.pooling is None
        return cls(
            text=spec.text if loads_mtp else replace(spec.text, mtp_layer=None),
            vision_weights=spec.vision_weights,
            context=spec.max_model_len,
            dtype=spec.dtype,
            file_bytes=weight_file_bytes(spec.folder) if file_bytes is None else file_bytes,
            stored_bits=spec.quantization.stored_bits if spec.quantization else None,
            draft=spec.draft.text if spec.draft else None,
            draft_bytes=weight_file_bytes(spec.draft.folder) if spec.draft else 0,
            pools=spec.pooling is not None,
        )


class FormatBytes(NamedTuple):
    """Bytes by the format of weights, as in `WeightRates`."""

    wide: float = 0
    int8: float = 0
    int4: float = 0

    def times(self, count: float) -> FormatBytes:
        """Return the bytes of `count` weights, if these are the average bytes of a weight."""
        return FormatBytes(*(count * each for each in self))


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightBytes:
    """Average bytes per weight in the memory of an engine.

    Attributes:
        layers: of the text model's layers.
        head: of the output layer, in addition to the embedding table if it shares that; 0 if it is not loaded.
        argmax: those of the output layer that a greedy step reads.
        vision: of the vision encoder.
        itemsize: of the embedding table, which is never quantized, and of hidden states.
    """

    layers: FormatBytes
    head: float
    argmax: FormatBytes
    vision: float
    itemsize: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """What a model needs, in bytes.

    Attributes:
        weights: text model and vision encoder.
        kv_cache: keys, values and recurrent states, when the cache is full.
        vision_cache: embeddings of images and videos, when the cache is full.
        process: everything else.
        step: weights that are read to generate a token of one sequence.
        layers: number of layers of the text model.
        delta_nets: how many of them are gated delta nets.
        kernels: name of the kernels that run the text model.
        cost: that of these kernels.
    """

    weights: int
    kv_cache: int
    vision_cache: int
    process: int
    step: FormatBytes
    layers: int
    delta_nets: int
    kernels: str
    cost: StepCost

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.vision_cache + self.process

    def tokens_per_second(self, bandwidth: float, rates: Mapping[str, WeightRates]) -> float:
        """Return how many tokens one sequence gets.

        Args:
            bandwidth: that of the memory, in bytes per second.
            rates: by name of the kernels; if theirs were not measured, they follow from the bandwidth.
        """
        each = bandwidth / self.cost.slowdown
        measured = rates.get(self.kernels, (each, each, each))
        products = sum(size / rate for size, rate in zip(self.step, measured, strict=True))
        mixers = self.cost.layer_seconds * self.layers + self.cost.delta_net_seconds * self.delta_nets
        return 1 / (products + mixers)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSize:
    """What the memory for recurrent states, keys and values holds.

    Attributes:
        tokens: number of tokens with keys and values.
        token_bytes: size of those of a token.
        states: number of recurrent states; 0 for models without.
        state_bytes: size of a recurrent state.
    """

    tokens: int
    token_bytes: int
    states: int
    state_bytes: int

    @classmethod
    def of(
        cls, text: TextModelSpec, draft: TextModelSpec | None, *, mib: int, itemsize: int, cache_itemsize: int
    ) -> CacheSize:
        """Divide the memory: half of it is for recurrent states, since a prefix is cached with both. A sequence needs
        two.

        Args:
            text: the text model.
            draft: the text model, or the layer of the head, that drafts tokens, if there is one.
            mib: the memory in MiB, see `kv_budget_mib`.
            itemsize: bytes of a number of the dtype that the engine computes in.
            cache_itemsize: bytes of a number of keys and values.
        """
        state = state_bytes(text, itemsize)
        states = max(mib * MIB // 2 // state, 2) if state else 0
        token = kv_bytes_per_token(text, cache_itemsize)
        token += kv_bytes_per_token(draft, cache_itemsize) if draft else 0
        tokens = max(mib * MIB - states * state, 0) // token
        return cls(tokens=tokens, token_bytes=token, states=states, state_bytes=state)


def estimate_memory(
    size: ModelSize, config: EngineConfig, weights: WeightBytes, *, kernels: Kernels, memory: int | None
) -> MemoryEstimate:
    """Estimate what a model needs.

    Args:
        size: the model.
        config: how it is loaded.
        weights: see `weight_bytes`.
        kernels: those that run the text model.
        memory: what limits the default of the KV cache, see `memory_limit`; None on a device with its own memory.
    """
    return MemoryEstimate(
        weights=int(loaded_bytes(size, weights)),
        kv_cache=_cache_bytes(size, config, weights.itemsize, memory),
        vision_cache=config.vision_cache_mib * MIB,
        process=PROCESS_BYTES + BYTES_PER_TOKEN_ID * size.text.vocab_size,
        step=step_bytes(size.text, weights),
        layers=len(size.text.layers),
        delta_nets=size.text.num_delta_net_layers,
        kernels=kernels.name,
        cost=kernels.step_cost,
    )


def loaded_bytes(size: ModelSize, weights: WeightBytes) -> float:
    """Return what the weights of a model take in memory."""
    layers = sum(weights.layers) * (count_all_layer_weights(size.text) + count_mtp_weights(size.text))
    tables = (weights.itemsize + weights.head) * _table(size.text)
    return layers + tables + weights.vision * size.vision_weights + size.draft_bytes


def step_bytes(text: TextModelSpec, weights: WeightBytes) -> FormatBytes:
    """Return what a greedy decode step of one sequence reads: of a mixture, the experts of one token."""
    layers = weights.layers.times(count_layer_weights(text))
    return FormatBytes(*map(sum, zip(layers, weights.argmax.times(_table(text)), strict=True)))


def weight_bytes(
    size: ModelSize, config: EngineConfig, kernels: Kernels, *, itemsize: int, int8_vision: bool
) -> WeightBytes:
    """Return what weights take in memory.

    Args:
        size: the model.
        config: its `quantization` rounds weights.
        kernels: those that run the model.
        itemsize: bytes of a number of the dtype that the engine computes in.
        int8_vision: whether the vision encoder is rounded to 8 bits.
    """
    bits = kernels.weight_bits
    wide = itemsize / 16
    rounds_head = config.quantization != "none" and kernels.supports_int8
    head = 1 if rounds_head else wide * (bits.tied_head if size.text.tie_word_embeddings else bits.head)
    return WeightBytes(
        layers=_layer_bytes(size, config, kernels, wide=wide * bits.layer),
        head=0 if size.pools else head,
        argmax=FormatBytes(int8=1) if rounds_head else _argmax_bytes(bits, wide=wide),
        vision=_vision_bytes(size, int8_vision, wide=wide * bits.layer),
        itemsize=itemsize,
    )


def _argmax_bytes(bits: WeightBits, *, wide: float) -> FormatBytes:
    size = wide * bits.argmax
    return FormatBytes(int8=size) if bits.argmax < bits.layer else FormatBytes(wide=size)


def _vision_bytes(size: ModelSize, int8: bool, *, wide: float) -> float:
    kept = VISION_OUTPUTS if size.pools else 0
    return kept * wide + (1 - kept) if int8 else wide


def _layer_bytes(size: ModelSize, config: EngineConfig, kernels: Kernels, *, wide: float) -> FormatBytes:
    count = len(size.text.layers)
    if size.stored_bits == "int4" and kernels.supports_int4:
        return FormatBytes(int4=INT4_STORED)
    if size.stored_bits == "int8" and kernels.supports_int8:
        return FormatBytes(int8=1)
    if config.quantization == "int4" and kernels.supports_int4:
        wider = 2 if count > 2 else 0  # the first layer and the last one have 8 bits
        return FormatBytes(int8=wider / count, int4=(count - wider) / count * INT4_ROUNDED)
    if config.quantization == "int8" and kernels.supports_int8:
        kept = _output_share(size.text) if size.pools else 0
        return FormatBytes(wide=kept * wide, int8=1 - kept)
    return FormatBytes(wide=wide)


def _output_share(text: TextModelSpec) -> float:
    """Return the share of the layers' weights whose products are added to hidden states."""
    layers = [_with_all_experts(layer) for layer in text.layers]
    return sum(map(_output_columns, layers)) / sum(map(_columns, layers))


def _cache_bytes(size: ModelSize, config: EngineConfig, itemsize: int, memory: int | None) -> int:
    mib = kv_budget_mib(config, weights=size.file_bytes + size.draft_bytes, memory=memory)
    cache_itemsize = {"auto": itemsize, "bfloat16": 2, "int8": 1}[config.kv_cache_dtype]
    cache = CacheSize.of(size.text, size.draft, mib=mib, itemsize=itemsize, cache_itemsize=cache_itemsize)
    context = min(size.context, config.max_model_len or size.context)
    return cache.states * cache.state_bytes + min(cache.tokens, context * config.max_batch_size) * cache.token_bytes


def kv_bytes_per_token(text: TextModelSpec, itemsize: int) -> int:
    """Return what the keys and values of a token take; with an `itemsize` of 1, each row also has a float32 scale."""
    row = text.attention.head_dim * itemsize + (4 if itemsize == 1 else 0)
    return text.num_cache_layers * 2 * text.attention.num_kv_heads * row


def state_bytes(text: TextModelSpec, itemsize: int) -> int:
    """Return the size of a recurrent state: inputs of the convolution, and float32 matrices; 0 without delta nets."""
    spec = text.delta_net
    if spec is None:
        return 0
    delta = 4 * spec.num_value_heads * spec.key_dim * spec.value_dim
    return text.num_delta_net_layers * (itemsize * (spec.conv_width - 1) * spec.conv_channels + delta)


def kv_budget_mib(config: EngineConfig, *, weights: int, memory: int | None) -> int:
    """Return the size of the KV cache in MiB: `kv_cache_mib`, whose default fits into the memory.

    Args:
        config: the options.
        weights: size of the files with the weights in bytes.
        memory: see `memory_limit`; None on a device with its own memory.
    """
    if "kv_cache_mib" in config.model_fields_set or memory is None:
        return config.kv_cache_mib
    return default_kv_mib(config.kv_cache_mib, memory=memory, weights=weights)


def default_kv_mib(default: int, *, memory: int, weights: int) -> int:
    """Return the default size of the KV cache in MiB: at most half of the memory that the weights leave.

    Args:
        default: the size without this limit, in MiB.
        memory: see `memory_limit`.
        weights: size of the weights in bytes.
    """
    return min(default, max(MIN_KV_MIB, (memory - weights) // 2 // MIB))


def weight_file_bytes(folder: Path) -> int:
    """Return the size of a checkpoint's files with weights. Raise CheckpointError if one cannot be read."""
    try:
        return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    except OSError as error:
        message = f"{error.filename} cannot be read: {error.strerror}. Copy the checkpoint again."
        raise CheckpointError(message) from error


def memory_limit() -> int:
    """Return the memory that this process may use, in bytes: that of the machine, or less in a container."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = read_memory_limit()
    return machine if limit is None else min(machine, limit)


def count_weights(size: ModelSize) -> int:
    """Return the number of weights of a model, without biases and norms."""
    tables = (1 if size.text.tie_word_embeddings else 2) * _table(size.text)
    return count_all_layer_weights(size.text) + count_mtp_weights(size.text) + tables + size.vision_weights


def _table(text: TextModelSpec) -> int:
    return text.vocab_size * text.hidden_size


def count_all_layer_weights(text: TextModelSpec) -> int:
    """Return the number of weights of all layers."""
    return count_layer_weights(replace(text, layers=tuple(map(_with_all_experts, text.layers))))


def count_mtp_weights(text: TextModelSpec) -> int:
    """Return the number of weights of the head for multi-token prediction; 0 without one."""
    if text.mtp_layer is None:
        return 0
    return text.hidden_size * (2 * text.hidden_size + _columns(_with_all_experts(text.mtp_layer)))


def count_layer_weights(text: TextModelSpec) -> int:
    """Return the number of weights of all layers that compute one token: of a mixture, those of its experts."""
    return text.hidden_size * sum(map(_columns, text.layers))


def _columns(layer: LayerSpec) -> int:
    """Return the number of weights of a layer that compute one token, divided by the hidden size."""
    mixer, mlp = layer.mixer, layer.mlp
    if isinstance(mixer, AttentionSpec):
        columns = sum(mixer.outputs) + mixer.width
    else:
        columns = mixer.conv_channels + 2 * mixer.value_width + 2 * mixer.num_value_heads
    if isinstance(mlp, MlpSpec):
        return columns + 3 * mlp.intermediate_size
    inner = mlp.experts_per_token * mlp.intermediate_size + mlp.shared_intermediate_size
    return columns + mlp.num_experts + bool(mlp.shared_intermediate_size) + 3 * inner


def _output_columns(layer: LayerSpec) -> int:
    """Return the same for the weights whose products are added to hidden states."""
    mixer, mlp = layer.mixer, layer.mlp
    columns = mixer.width if isinstance(mixer, AttentionSpec) else mixer.value_width
    if isinstance(mlp, MlpSpec):
        return columns + mlp.intermediate_size
    return columns + mlp.experts_per_token * mlp.intermediate_size + mlp.shared_intermediate_size


def _with_all_experts(layer: LayerSpec) -> LayerSpec:
    if isinstance(layer.mlp, MlpSpec):
        return layer
    return replace(layer, mlp=replace(layer.mlp, experts_per_token=layer.mlp.num_experts))
