"""Steps of few tokens in fixed shapes, which a GPU replays as CUDA graphs.

A graph has fixed shapes and addresses (see `kernels.graphs`). Therefore, a step is padded to the next larger one of a
few shapes.

Each token is a row with its own range of keys, so that prompts, drafts and single tokens need no different shapes.
Padding rows are tokens whose only key is in the last row of the KV cache, which no sequence uses.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dashinfer_vlm_core.kernels.cuda import CudaKernels
from dashinfer_vlm_core.kernels.graphs import CudaGraphRecorder, Recorder
from dashinfer_vlm_core.kernels.streams import copy_to_device, to_device
from dashinfer_vlm_core.kernels.types import ForwardBatch, KeyRanges, KVSpan, KVSpans
from dashinfer_vlm_core.progress import Progress

from .kv_cache import KVCache
from .model import TextModel

logger: logging.Logger = logging.getLogger(__name__)

MIN_LARGEST_TOKENS = 32
MAX_TOKENS = 256
"""Limits of the largest number of tokens. A single sequence may have a draft, so it is not the number of sequences, and
the kernels of larger steps take longer than launching them."""

MIN_KEYS = 1024
KEYS_FACTOR = 4
"""The smallest number of keys, and that of each shape relative to the next smaller one. They are coarse: FlashAttention
reads only the keys that a token has, and only divides its work by the number of the shape."""


class StepShape(NamedTuple):
    """The shape of a step.

    Attributes:
        tokens: number of tokens.
        keys: maximum number of keys that a token attends to.
    """

    tokens: int
    keys: int


def step_shapes(*, max_batch_size: int, max_model_len: int) -> list[StepShape]:
    """Return the shapes for a decoder with these limits, the largest first: smaller graphs then reuse its memory."""
    tokens = [1]
    while tokens[-1] < min(max(max_batch_size, MIN_LARGEST_TOKENS), MAX_TOKENS):
        tokens.append(2 * tokens[-1])
    keys = [min(MIN_KEYS, max_model_len)]
    while keys[-1] < max_model_len:
        keys.append(min(KEYS_FACTOR * keys[-1], max_model_len))
    return [StepShape(count, limit) for count in reversed(tokens) for limit in reversed(keys)]


def unsupported_reason(model: TextModel, cache: KVCache) -> str:
    """Return why the steps of a model cannot be recorded; empty if they can."""
    if not isinstance(model.kernels, CudaKernels):
        return f"the kernels {model.kernels.name!r} compute attention for one sequence at a time"
    if model.loops_over_experts:
        return "the CPU reads the number of tokens of each expert"
    if cache.pool.dtype != model.dtype:
        return "the KV cache is converted for one sequence at a time"
    return ""


def record_graphs(model: TextModel, cache: KVCache, shapes: Iterable[StepShape]) -> DecodeGraphs | None:
    """Record steps of these shapes as CUDA graphs; None, which is logged with the reason, if that is not possible."""
    if reason := unsupported_reason(model, cache):
        logger.info("There are no CUDA graphs for this model: %s.", reason)
        return None
    started = time.perf_counter()
    try:
        graphs = DecodeGraphs(model, cache, CudaGraphRecorder())
        with Progress(shapes, desc="Recording CUDA graphs", unit="") as progress:
            for shape in progress:
                model.executor.run(functools.partial(graphs.record, shape))
    except RuntimeError:
        logger.warning(
            "CUDA graphs could not be recorded, so decode steps are slower. `cuda_graphs` false omits them.",
            exc_info=True,
        )
        return None
    logger.info("CUDA graphs of %d shapes recorded in %.1f s.", len(graphs), time.perf_counter() - started)
    return graphs


class DecodeGraphs:
    """The recorded steps of a model; used by one thread at a time.

    Args:
        model: the model.
        cache: its KV cache, whose last row is not used by sequences.
        recorder: records the work of a step.
    """

    def __init__(self, model: TextModel, cache: KVCache, recorder: Recorder) -> None:
        self._model = model
        self._cache = cache
        self._recorder = recorder
        last_row = cache.pool.shape[2] - 1
        self._padding = np.array([0, 0, 0, 0, last_row, last_row, 1], dtype=np.int64)[:, None]
        self._steps: dict[StepShape, _RecordedStep] = {}

    def __len__(self) -> int:
        """Return the number of recorded shapes."""
        return len(self._steps)

    @torch.inference_mode()
    def record(self, shape: StepShape) -> None:
        """Record the steps of a shape, with a step that consists of padding."""
        padding = torch.from_numpy(np.tile(self._padding, shape.tokens))
        inputs = to_device(padding, self._model.device)
        work = functools.partial(_compute, self._model, self._cache, inputs, shape.keys)
        self._steps[shape] = _RecordedStep(inputs, self._recorder(work))

    def run(
        self, packed: npt.NDArray[np.int64], spans: Sequence[KVSpan], token_ids: Tensor | None = None
    ) -> Tensor | None:
        """Compute the hidden states of a step.

        Args:
            packed: int64 [5, tokens]: ids, positions on three axes, rows of the cache.
            spans: the keys that the tokens of each sequence attend to: each token to those up to its own.
            token_ids: int64 [tokens] on the device, instead of the ids in `packed`.

        Returns:
            [tokens, hidden_size], valid until the next call; None if no recorded shape is large enough.
        """
        count = packed.shape[1]
        keys = max(span.num_keys for span in spans)
        shape = min((shape for shape in self._steps if shape.tokens >= count and shape.keys >= keys), default=None)
        if shape is None:
            return None
        inputs = np.empty((len(self._padding), shape.tokens), dtype=np.int64)
        inputs[:5, :count] = packed
        inputs[5, :count] = np.repeat([span.first_key for span in spans], [span.num_queries for span in spans])
        inputs[6, :count] = packed[4] - inputs[5, :count] + 1
        inputs[:, count:] = self._padding
        step = self._steps[shape]
        copy_to_device(torch.from_numpy(inputs), step.inputs)
        if token_ids is not None:
            step.inputs[0, :count].copy_(token_ids)
        return step.replay()[:count]


class _RecordedStep(NamedTuple):
    """A recorded step.

    Attributes:
        inputs: int64 [7, tokens], which `replay` reads: ids, positions on three axes, rows of the cache, and the first
            row and the number of the keys of each token.
        replay: returns the hidden states [tokens, hidden_size].
    """

    inputs: Tensor
    replay: Callable[[], Tensor]


def _compute(model: TextModel, cache: KVCache, inputs: Tensor, max_keys: int) -> Tensor:
    numbers = torch.arange(inputs.shape[1] + 1, device=inputs.device)
    first_keys, num_keys = inputs[5:].int()
    ranges = KeyRanges(
        query_starts=numbers.int(),
        first_keys=torch.cat([first_keys, num_keys[:1]]),
        num_keys=num_keys,
        max_queries=1,
        max_keys=max_keys,
        is_causal=True,
    )
    spans = KVSpans((), ranges=ranges)
    cos, sin = model.rotary(inputs[1:4])
    batch = ForwardBatch(cos, sin, inputs[4], spans, numbers[:-1], spans, cache.pool, cache_scales=cache.scales)
    return model.forward(model.embed(inputs[0]), batch)
