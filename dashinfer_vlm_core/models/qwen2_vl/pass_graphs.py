"""Small passes of the vision encoder over recurring sizes, which a GPU replays as CUDA graphs.

A graph is recorded for the grids of all items of a pass, in order: attention depends on each of them. Many images have
the same size, such as frames of a camera, pages, or everything above the limit of pixels with one aspect ratio.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from cachetools import LRUCache
from torch import Tensor

from ...config import EngineConfig
from ...kernels.cuda import CudaKernels
from ...kernels.graphs import CudaGraphRecorder, Recorder
from ...kernels.streams import copy_to_device
from ...kernels.types import Kernels
from ...media.types import Grid

logger: logging.Logger = logging.getLogger(__name__)

MAX_PATCHES = 4096
"""Four images of 448x448. The kernels of larger passes take longer than launching them."""

MIN_PASSES = 3
"""A pass is recorded the third time, since recording takes as long as several passes."""

MAX_GRAPHS = 16
"""They take memory and are never discarded: the first recurring sizes have graphs, others do not."""

MAX_COUNTED = 1024
"""Sizes whose passes are counted; the least recently used one is forgotten."""

Encode: TypeAlias = Callable[[Tensor, Any], Tensor]
"""Encodes pixels, uint8 [patches, columns] on the device, with what `MakeInputs` returned for their grids."""
MakeInputs: TypeAlias = Callable[[Sequence[Grid]], Any]
"""Computes on the device what a pass needs of the grids of its items."""


class PassGraphs:
    """The recorded passes of one encoder; used by one thread at a time.

    Args:
        recorder: records the work of a pass.
        device: the encoder's.
    """

    def __init__(self, recorder: Recorder, device: torch.device | str) -> None:
        self._recorder: Recorder | None = recorder
        self._device = device
        self._counts: LRUCache[tuple[Grid, ...], int] = LRUCache(MAX_COUNTED)
        self._passes: dict[tuple[Grid, ...], _RecordedPass] = {}

    def __len__(self) -> int:
        """Return the number of recorded passes."""
        return len(self._passes)

    def run(self, grids: Sequence[Grid], pixels: Tensor, make_inputs: MakeInputs, encode: Encode) -> Tensor | None:
        """Encode a pass that is recorded, or is recorded now.

        Args:
            grids: those of the items, in order.
            pixels: uint8 [patches, columns] on the CPU.
            make_inputs: see `MakeInputs`.
            encode: see `Encode`.

        Returns:
            What `encode` returns, valid until the next call; None if the pass has no graph.
        """
        key = tuple(grids)
        if key not in self._passes and not self._record(key, pixels, make_inputs, encode):
            return None
        recorded = self._passes[key]
        copy_to_device(pixels, recorded.pixels)
        return recorded.replay()

    def _record(self, key: tuple[Grid, ...], pixels: Tensor, make_inputs: MakeInputs, encode: Encode) -> bool:
        if self._recorder is None or len(pixels) > MAX_PATCHES or len(self._passes) == MAX_GRAPHS:
            return False
        self._counts[key] = self._counts.get(key, 0) + 1
        if self._counts[key] < MIN_PASSES:
            return False
        try:
            fixed = torch.empty_like(pixels, device=self._device)
            inputs = make_inputs(key)
            replay = self._recorder(functools.partial(encode, fixed, inputs))
            self._passes[key] = _RecordedPass(fixed, inputs, replay)
        except RuntimeError:
            logger.warning(
                "A pass of the vision encoder could not be recorded as a CUDA graph, so small passes are slower."
                " `cuda_graphs` false omits them.",
                exc_info=True,
            )
            self._recorder = None
            return False
        return True


class _RecordedPass(NamedTuple):
    """A recorded pass.

    Attributes:
        pixels: uint8 [patches, columns] on the device, which `replay` reads.
        inputs: has the other tensors that `replay` reads.
        replay: returns the encoded items.
    """

    pixels: Tensor
    inputs: Any
    replay: Callable[[], Tensor]


def pass_graphs(config: EngineConfig, kernels: Kernels, device: torch.device | str) -> PassGraphs | None:
    """Return what records the passes of an encoder; None if they are not recorded on this device."""
    if config.cuda_graphs and torch.device(device).type == "cuda" and isinstance(kernels, CudaKernels):
        return PassGraphs(CudaGraphRecorder(), device)
    return None
