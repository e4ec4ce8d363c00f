"""The vision encoder of Qwen2-VL (arXiv:2409.12191), and what later families share with it: encodes many images and
videos in one packed forward pass.

In shapes, `n` is the number of patches of all items, `d` is `hidden_size` and `c` is the head dimension. A merge unit
is the `spatial_merge_size` squared patches that become one visual token.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...concurrency.compute import Executor
from ...kernels.streams import LOW_PRIORITY, stream_executor, to_device
from ...kernels.types import Kernels, KVSpan, KVSpans, Linear, Norm
from ...media.types import Grid
from ..interface import Patches
from ..spec import PixelSpec
from .config import VISION_ROPE_THETA, VisionConfig
from .pass_graphs import PassGraphs

NORM_EPS = 1e-6

BATCH_PATCHES_CPU = 2048
"""Two images of 448x448. A single one already reaches nine tenths of a CPU's peak bf16 GEMM throughput."""

BATCH_PATCHES = 16384
"""Not measured on a GPU."""

MLP_PATCHES_CPU = 2048
"""Patches whose MLP is computed together on a CPU, so that its inner results are small enough for malloc to reuse their
memory: in new memory, each page causes a fault. Pages of 1,240 x 1,754 pixels take 2 to 4 % less time."""

EXCLUSIVE_FLOP = 100e9
"""Floating-point operations of consecutive blocks between two points where other work may run: a quarter of a second on
two cores with AVX-512. With shorter intervals, decode steps of a few sequences take half of the compute time while many
images wait."""

MIN_EXCLUSIVE_SECONDS = 0.12
"""The same for a CPU with AMX, which computes as many operations in 0.04 s, while its decode steps are as slow."""


class Block(NamedTuple):
    """One block of the vision encoder; `up` and `down` are its MLP."""

    norm1: Norm
    qkv: Linear
    proj: Linear
    norm2: Norm
    up: Linear
    down: Linear


class Merger(NamedTuple):
    """A patch merger: turns each merge unit, consecutive in the order of the patches, into one visual token.

    It normalizes patches, or whole merge units if the norm has their width.
    """

    norm: Norm
    fc1: Linear
    fc2: Linear


class PartDivider:
    """Divides the blocks of a forward pass into parts, between which other work may run.

    A part has at least `EXCLUSIVE_FLOP` floating-point operations and takes at least `MIN_EXCLUSIVE_SECONDS`.

    Args:
        flop: floating-point operations of a block.
        device: where the blocks run. Time counts on a CPU only: other devices compute asynchronously.
    """

    def __init__(self, flop: float, device: torch.device) -> None:
        self._min_blocks = max(1, int(EXCLUSIVE_FLOP / flop))
        self._min_seconds = MIN_EXCLUSIVE_SECONDS if device.type == "cpu" else 0.0
        self.begin()

    def begin(self) -> None:
        """Begin the next part."""
        self._start = time.perf_counter()
        self._blocks = 0

    def ends(self) -> bool:
        """Count a block that has run; returns whether the part ends with it."""
        self._blocks += 1
        return self._blocks >= self._min_blocks and time.perf_counter() - self._start >= self._min_seconds


class VisionInputs:
    """What the blocks need of the grids of the items, on the model's device: computed once per forward pass.

    Attributes:
        spans: those of each block, one per frame, since attention stays within a frame.
        cos: float32 [n, c / 2].
        sin: float32 [n, c / 2].
    """

    def __init__(self, grids: Sequence[Grid], config: VisionConfig, device: torch.device) -> None:
        frames = consecutive_spans((frame_length(grid) for grid in grids for _ in range(grid.t)), device)
        self.spans: Sequence[KVSpans] = [frames] * config.depth
        self.cos: torch.Tensor
        self.sin: torch.Tensor
        self.cos, self.sin = rotary_tables(
            grids, head_dim=config.hidden_size // config.num_heads, merge=config.spatial_merge_size, device=device
        )

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input of the first block for embedded patches [n, d], which may be changed."""
        return x

    def restore(self, merged: torch.Tensor) -> torch.Tensor:
        """Return visual tokens [n / merge unit, columns] in the order of the patches."""
        return merged


def consecutive_spans(lengths: Iterable[int], device: torch.device) -> KVSpans:
    """Return spans of these lengths, in each of which all patches attend to each other."""
    counts = list(lengths)
    starts = np.cumsum([0, *counts[:-1]]).tolist()
    return KVSpans([KVSpan(start, n, start, n) for start, n in zip(starts, counts, strict=True)], device=device)


@dataclass(frozen=True, kw_only=True, eq=False)
class VisionModel:
    """The published vision encoder, on one device, in one dtype. Families override what differs.

    Attributes:
        patch_embed: the published convolution; its stride equals its kernel size, so that it is a matrix product on
            patches.
        merger: merges the output of the last block.
        deepstack: the mergers of earlier blocks, by the index of the block (DeepStack, arXiv:2406.04334).
    """

    config: VisionConfig
    kernels: Kernels
    device: torch.device
    dtype: torch.dtype
    patch_embed: Linear
    blocks: Sequence[Block]
    merger: Merger
    deepstack: Mapping[int, Merger]

    def inputs(self, grids: Sequence[Grid]) -> VisionInputs:
        """Compute what the blocks need of the grids of the items."""
        return VisionInputs(grids, self.config, self.device)

    def parts(self, patches: torch.Tensor, inputs: VisionInputs) -> Generator[None, None, torch.Tensor]:
        """Encode normalized patches [n, columns] of items with `inputs`; yields where other work may run. Nothing is
        copied from the CPU when it is called again with the same inputs.

        Returns:
            [n / spatial_merge_size ** 2, visual width], in the order of the patches: the embedding, then one level for
            each of the `deepstack` mergers.
        """
        x = inputs.apply(self.patch_embed(patches))
        divider = PartDivider(24 * len(x) * self.config.hidden_size**2, self.device)
        levels = []
        for number, block in enumerate(self.blocks):
            self._run_block(block, x, inputs, inputs.spans[number])
            if number in self.deepstack:
                levels.append(self._merge(x, self.deepstack[number]))
            if divider.ends():
                yield
                divider.begin()
        embedding = self._merge(x, self.merger)
        return inputs.restore(torch.cat([embedding, *levels], dim=1) if levels else embedding)

    def _run_block(self, block: Block, x: torch.Tensor, inputs: VisionInputs, spans: KVSpans) -> None:
        """Add the attention output and then the MLP output of a block to x [n, d], in place."""
        heads = self.config.num_heads
        qkv = block.qkv(self._normalize(x, block.norm1)).view(len(x), 3 * heads, -1)
        self.kernels.rotate_(qkv[:, : 2 * heads], inputs.cos, inputs.sin)
        query, key, value = torch.split(qkv, heads, dim=1)
        block.proj.add_to(x, self.kernels.attend(query, key.transpose(0, 1), value.transpose(0, 1), spans))
        for part in torch.split(x, MLP_PATCHES_CPU) if self.device.type == "cpu" else (x,):
            block.down.add_to(part, block.up(self._normalize(part, block.norm2)))

    def _merge(self, x: torch.Tensor, merger: Merger) -> torch.Tensor:
        normed = self._normalize(x.view(-1, len(merger.norm.weight)), merger.norm)
        return merger.fc2(merger.fc1(normed.view(-1, self.config.merge_width)))

    def _normalize(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self.kernels.norm(x, norm.weight, norm.bias, NORM_EPS)


class Qwen2VLEncoder:
    """The `VisionEncoder` of Qwen2-VL, and of families whose items are patched and normalized like its items.

    An item's rows depend on the rest of its batch only by rounding, because libraries may sum in a different order for
    a different number of rows: in float32, within 1e-5 of the largest value. With the C kernels they do not depend on
    the batch at all. Attention stays within a temporal patch, and positions do not depend on time.
    """

    splits_videos = True

    def __init__(self, model: VisionModel, pixels: PixelSpec, *, graphs: PassGraphs | None = None) -> None:
        self.model = model
        self._graphs = graphs
        self.executor: Executor = stream_executor(str(model.device), priority=LOW_PRIORITY)
        self._merge_unit = pixels.merge_size**2
        self.batch_patches = BATCH_PATCHES_CPU if model.device.type == "cpu" else BATCH_PATCHES
        columns = pixels.temporal_patch_size * pixels.patch_size**2
        self.mean: torch.Tensor = 255 * torch.tensor(pixels.mean, device=model.device).repeat_interleave(columns)
        self.std: torch.Tensor = 255 * torch.tensor(pixels.std, device=model.device).repeat_interleave(columns)

    def encode(self, batch: Sequence[Patches]) -> list[torch.Tensor]:
        parts = self._encode(batch)
        encoded = None
        if self.model.device.type == "cuda":  # which runs other work at the same time
            return self.executor.run(lambda: next(part for part in parts if part is not None))
        while encoded is None:
            encoded = self.executor.run(lambda: next(parts))
        return encoded

    @torch.inference_mode()
    def _encode(self, batch: Sequence[Patches]) -> Iterator[list[torch.Tensor] | None]:
        """Yield None where other work may run, and finally the encoded items."""
        # Sorted, so that frames of equal size are adjacent, and equal grids in any order are the same pass; cloned, so
        # that an item does not keep its batch's memory.
        order = sorted(range(len(batch)), key=lambda index: (frame_length(batch[index].grid), batch[index].grid))
        grids = [batch[index].grid for index in order]
        pixels = torch.from_numpy(np.concatenate([batch[index].pixels for index in order]))
        encoded = None
        if self._graphs is not None:
            encoded = self._graphs.run(grids, pixels, self.model.inputs, self._encode_at_once)
        if encoded is None:
            encoded = yield from self.model.parts(self.normalize(pixels), self.model.inputs(grids))
        rows = torch.split(encoded, [grid.patches // self._merge_unit for grid in grids])
        yield [item.clone() for _, item in sorted(zip(order, rows, strict=True))]

    def _encode_at_once(self, pixels: torch.Tensor, inputs: VisionInputs) -> torch.Tensor:
        encoded = list[torch.Tensor]()

        def run() -> Generator[None, None, None]:
            encoded.append((yield from self.model.parts(self.normalize(pixels), inputs)))

        for _ in run():
            pass
        return encoded[0]

    def adopt(self, rows: npt.NDArray[np.float32]) -> torch.Tensor:
        return self.executor.run(lambda: torch.from_numpy(rows).to(self.model.device, self.model.dtype))

    def normalize(self, pixels: torch.Tensor) -> torch.Tensor:
        """Convert uint8 pixels [n, columns], on any device, to the encoder's dtype and device, and normalize each
        channel."""
        return ((to_device(pixels, self.model.device).float() - self.mean) / self.std).to(self.model.dtype)


def frame_length(grid: Grid) -> int:
    """Return the number of patches of one frame."""
    return grid.h * grid.w


def patch_positions(h: int, w: int, merge: int) -> torch.Tensor:
    """Return the row and column of each patch of one frame, in patch order: by windows of `merge` x `merge` patches.

    Returns:
        int64 [h * w, 2].
    """
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    windows = torch.stack((rows, columns), dim=-1).view(h // merge, merge, w // merge, merge, 2)
    return windows.transpose(1, 2).reshape(-1, 2)


def rotary_tables(
    grids: Sequence[Grid], *, head_dim: int, merge: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the 2-D rotary embedding of all patches; all frames of an item have the same values.

    Sources: Qwen2-VL (arXiv:2409.12191, section 2.1) and RoPE (arXiv:2104.09864).

    The first half of a table's columns encodes the row, the second half the column.

    Returns:
        Two float32 tensors [patches, head_dim // 2].
    """
    positions = torch.cat([patch_positions(grid.h, grid.w, merge).repeat(grid.t, 1) for grid in grids])
    exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=device) / (head_dim // 2)
    angles = (to_device(positions, device)[:, :, None] / VISION_ROPE_THETA**exponents).flatten(1)
    return angles.cos(), angles.sin()
