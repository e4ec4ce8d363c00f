"""The vision encoder of Qwen2-VL (arXiv:2409.12191): encodes many images and videos in one packed forward pass.

In shapes, `n` is the number of patches of all items, `d` is `embed_dim` and `c` is the head dimension. A merge unit is
the `spatial_merge_size` squared patches that become one visual token.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ...concurrency.compute import Executor, executor_for
from ...config import EngineConfig
from ...kernels.choice import KernelSelector
from ...kernels.linears import create_linear
from ...kernels.quantization import INT8, QuantizedWeight
from ...kernels.streams import LOW_PRIORITY, stream_executor, to_device
from ...kernels.types import Activation, Kernels, KVSpan, KVSpans, Linear, Norm
from ...media.types import Grid
from ..interface import Patches
from ..lora import LoraWeights, VisionMerge
from ..placement import quantizes_vision_encoder, resolve_placement
from ..spec import ModelSpec, PixelSpec
from ..weights import Weights
from .config import VisionConfig
from .pass_graphs import PassGraphs, pass_graphs
from .rope import rotary_tables

InputsT = TypeVar("InputsT")

LAYER_NORM_EPS = 1e-6

BATCH_PATCHES_CPU = 2048
"""Two images of 448x448. A single one already reaches nine tenths of a CPU's peak bf16 GEMM throughput."""

BATCH_PATCHES = 16384
"""Not measured on a GPU."""

EXCLUSIVE_FLOP = 100e9
"""Floating-point operations of consecutive blocks between two points where other work may run: a quarter of a second on
two cores with AVX-512. With shorter intervals, decode steps of a few sequences take half of the compute time while many
images wait."""

MIN_EXCLUSIVE_SECONDS = 0.12
"""The same for a CPU with AMX, which computes as many operations in 0.04 s, while its decode steps are as slow."""

ACTIVATIONS = {"quick_gelu": Activation.QUICK_GELU, "gelu": Activation.GELU}


class Block(NamedTuple):
    """One block of the vision encoder."""

    norm1: Norm
    qkv: Linear
    proj: Linear
    norm2: Norm
    fc1: Linear
    fc2: Linear


class Merger(NamedTuple):
    """The patch merger: turns each merge unit, consecutive in patch order, into one visual token."""

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


class AttentionInputs:
    """Attention spans and rotary tables of the patches, computed once per forward pass and used by every block.

    Attributes:
        spans: one per frame, since attention stays within a frame.
        cos: float32 [n, c / 2].
        sin: float32 [n, c / 2].
    """

    def __init__(self, grids: Sequence[Grid], *, head_dim: int, merge: int, device: torch.device) -> None:
        lengths = [frame_length(grid) for grid in grids for _ in range(grid.t)]
        starts = np.cumsum([0, *lengths[:-1]]).tolist()
        spans = [KVSpan(start, count, start, count) for start, count in zip(starts, lengths, strict=True)]
        self.spans: KVSpans = KVSpans(spans, device=device)
        self.cos: torch.Tensor
        self.sin: torch.Tensor
        self.cos, self.sin = rotary_tables(grids, head_dim=head_dim, merge=merge, device=device)


@dataclass(frozen=True, kw_only=True, eq=False)
class VisionModel:
    """The parts that the published vision encoders have in common, on one device, in one dtype.

    Attributes:
        patch_embed: the published convolution; its stride equals its kernel size, so that it is a matrix product on
            patches.
        merger: merges the output of the last block.
    """

    kernels: Kernels
    device: torch.device
    dtype: torch.dtype
    patch_embed: Linear
    merger: Merger


@dataclass(frozen=True, kw_only=True, eq=False)
class Qwen2VLVisionModel(VisionModel):
    """The published vision encoder; a `PackedVisionModel`."""

    config: VisionConfig
    blocks: Sequence[Block]

    def inputs(self, grids: Sequence[Grid]) -> AttentionInputs:
        return AttentionInputs(
            grids,
            head_dim=self.config.embed_dim // self.config.num_heads,
            merge=self.config.spatial_merge_size,
            device=self.device,
        )

    def parts(self, patches: torch.Tensor, inputs: AttentionInputs) -> Generator[None, None, torch.Tensor]:
        """See `PackedVisionModel`.

        Returns:
            [n / spatial_merge_size ** 2, hidden_size].
        """
        x = self.patch_embed(patches)
        divider = PartDivider(24 * len(x) * self.config.embed_dim**2, self.device)
        for block in self.blocks:
            run_block(self.kernels, block, x, inputs, heads=self.config.num_heads)
            if divider.ends():
                yield
                divider.begin()
        width = self.config.embed_dim * self.config.spatial_merge_size**2
        return self.merger.fc2(self.merger.fc1(layer_norm(self.kernels, x, self.merger.norm).view(-1, width)))


def run_block(kernels: Kernels, block: Block, x: torch.Tensor, inputs: AttentionInputs, *, heads: int) -> None:
    """Add the attention output and then the MLP output of a block to x [n, d], in place."""
    qkv = block.qkv(layer_norm(kernels, x, block.norm1))
    block.proj.add_to(x, attend(kernels, qkv, inputs.cos, inputs.sin, inputs.spans, heads=heads))
    block.fc2.add_to(x, block.fc1(layer_norm(kernels, x, block.norm2)))


def attend(
    kernels: Kernels, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, spans: KVSpans, *, heads: int
) -> torch.Tensor:
    """Return the attention [n, d] of projected queries, keys and values [n, 3 * d]; rotates them in place."""
    qkv = qkv.view(len(qkv), 3 * heads, -1)
    kernels.rotate_(qkv[:, : 2 * heads], cos, sin)
    query, key, value = torch.split(qkv, heads, dim=1)
    return kernels.attend(query, key.transpose(0, 1), value.transpose(0, 1), spans)


def layer_norm(kernels: Kernels, x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return kernels.norm(x, norm.weight, norm.bias, LAYER_NORM_EPS)


class PackedVisionModel(Protocol[InputsT]):
    """A vision encoder on one device, in one dtype, that encodes many items in one packed forward pass."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def inputs(self, grids: Sequence[Grid]) -> InputsT:
        """Compute what the blocks need of the grids of the items, on the model's device."""

    def parts(self, patches: torch.Tensor, inputs: InputsT) -> Generator[None, None, torch.Tensor]:
        """Encode normalized patches [n, columns] of items with `inputs`; yields where other work may run. Nothing is
        copied from the CPU when it is called again with the same inputs.

        Returns:
            [n / merge_size ** 2, visual width], in the order of the patches.
        """


class Qwen2VLEncoder:
    """The `VisionEncoder` of Qwen2-VL, and of families whose items are patched and normalized like its items.

    An item's rows depend on the rest of its batch only by rounding, because libraries may sum in a different order for
    a different number of rows: in float32, within 1e-5 of the largest value. With the C kernels they do not depend on
    the batch at all.
    """

    def __init__(self, model: PackedVisionModel[Any], pixels: PixelSpec, *, graphs: PassGraphs | None = None) -> None:
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

    def _encode_at_once(self, pixels: torch.Tensor, inputs: Any) -> torch.Tensor:
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


def load_encoder(
    spec: ModelSpec,
    config: EngineConfig,
    kernels: KernelSelector,
    lora: LoraWeights | None,
    load_model: Callable[[VisionWeights], PackedVisionModel[Any]],
) -> Qwen2VLEncoder:
    """Load a checkpoint's vision encoder, whose model `load_model` reads; see `ModelFamily.load_vision_encoder`."""
    with VisionWeights.open(spec, config, kernels, lora) as weights:
        model = load_model(weights)
        return Qwen2VLEncoder(model, spec.pixels, graphs=pass_graphs(config, weights.kernels, weights.device))


class VisionWeights(NamedTuple):
    """Reads the parameters of a vision encoder one by one, directly into their final memory.

    They are named without the prefix `visual.`. Each method raises `CheckpointError` if a tensor is missing or has
    another shape.
    """

    weights: Weights
    kernels: Kernels
    device: str
    dtype: torch.dtype
    int8: bool = False

    @classmethod
    @contextmanager
    def open(
        cls, spec: ModelSpec, config: EngineConfig, kernels: KernelSelector, lora: LoraWeights | None
    ) -> Iterator[VisionWeights]:
        """Open a checkpoint, with the device, dtype and kernels that the configuration selects.

        Raises:
            CheckpointError: at the end, if not all tensors that `lora` changes were read.
        """
        merge = VisionMerge(lora) if lora else None
        device, dtype = resolve_placement(config, spec)
        with Weights.open(spec.folder, spec.tensor_renames, spec.quantization, merge) as weights:
            chosen = kernels.choose(device, dtype)
            yield cls(weights, chosen, device, dtype, quantizes_vision_encoder(config, chosen))
        if merge:
            merge.check_complete()

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self.weights.tensor(f"visual.{name}", shape, device=self.device, dtype=self.dtype)

    def norm(self, name: str, width: int) -> Norm:
        return Norm(self.tensor(f"{name}.weight", width), self.tensor(f"{name}.bias", width))

    def matrix(self, names: Sequence[str], outputs: Sequence[int], inputs: int) -> torch.Tensor | QuantizedWeight:
        """Read the weights of linear layers, concatenated along the outputs. They may be stored quantized."""
        modules = [f"visual.{name}" for name in names]
        return self.weights.matrix(modules, outputs, inputs, device=self.device, dtype=self.dtype)

    def linear(self, name: str, outputs: int, inputs: int, activation: Activation = Activation.NONE) -> Linear:
        """Read a linear layer of the blocks or the merger, which may be quantized."""
        weight = self.matrix([name], [outputs], inputs)
        return self.layer(weight, self.tensor(f"{name}.bias", outputs), activation)

    def layer(
        self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor, activation: Activation = Activation.NONE
    ) -> Linear:
        """Create a linear layer of the blocks or the merger, which may be quantized."""
        quantization = INT8 if self.int8 else None
        return create_linear(
            self.kernels, weight, bias, dtype=self.dtype, activation=activation, quantization=quantization
        )

    def output(self, name: str, outputs: int, inputs: int) -> Linear:
        """Read the layer whose results are the visual tokens. It is not quantized: its rounding errors would be larger
        than those of all other layers together, and it has less than 1 % of the multiplications."""
        return self._replace(int8=False).linear(name, outputs, inputs)

    def convolution(self, name: str, *shape: int) -> Linear:
        return self.kernels.linear(self.tensor(f"{name}.weight", *shape).flatten(1))


def load_vision_model(config: VisionConfig, read: VisionWeights) -> Qwen2VLVisionModel:
    """Load the vision encoder of an opened checkpoint in parts, so that other work may run in between.

    Raises:
        CheckpointError: a tensor is missing or has an unexpected shape.
    """
    patch = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
    kernels = read.kernels
    run = executor_for(read.device).run
    return Qwen2VLVisionModel(
        config=config,
        kernels=kernels,
        device=torch.device(read.device),
        dtype=read.dtype,
        patch_embed=run(lambda: read.convolution("patch_embed.proj", config.embed_dim, *patch)),
        blocks=[
            run(functools.partial(_load_block, f"blocks.{number}", config, read)) for number in range(config.depth)
        ],
        merger=run(lambda: _load_merger(config, read)),
    )


def _load_block(name: str, config: VisionConfig, read: VisionWeights) -> Block:
    width = config.embed_dim
    inner = int(config.embed_dim * config.mlp_ratio)
    return Block(
        norm1=read.norm(f"{name}.norm1", width),
        qkv=read.linear(f"{name}.attn.qkv", 3 * width, width),
        proj=read.linear(f"{name}.attn.proj", width, width),
        norm2=read.norm(f"{name}.norm2", width),
        fc1=read.linear(f"{name}.mlp.fc1", inner, width, ACTIVATIONS[config.hidden_act]),
        fc2=read.linear(f"{name}.mlp.fc2", width, inner),
    )


def _load_merger(config: VisionConfig, read: VisionWeights) -> Merger:
    width = config.embed_dim * config.spatial_merge_size**2
    return Merger(
        norm=read.norm("merger.ln_q", config.embed_dim),
        fc1=read.linear("merger.mlp.0", width, width, Activation.GELU),
        fc2=read.output("merger.mlp.2", config.hidden_size, width),
    )
