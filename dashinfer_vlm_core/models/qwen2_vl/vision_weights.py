"""Read the tensors of a vision encoder, which families name in different ways."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch

from ...concurrency.compute import executor_for
from ...config import EngineConfig
from ...kernels.choice import KernelSelector
from ...kernels.linears import create_linear
from ...kernels.quantization import INT8
from ...kernels.types import Activation, Kernels, Linear, Norm
from ...progress import Progress
from ..lora import LoraWeights, VisionMerge
from ..placement import quantizes_vision_encoder, resolve_placement
from ..pooling import keeps_outputs
from ..spec import ModelSpec
from ..weight_cache import ConvertedWeights, layer_name
from ..weights import Weights
from .config import VisionConfig
from .vit import Block, Merger, VisionModel

ModelT = TypeVar("ModelT", bound=VisionModel)

ACTIVATIONS = {
    "quick_gelu": Activation.QUICK_GELU,
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "silu": Activation.SILU_GATE,
}


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
    keeps_outputs: bool = False
    converted: ConvertedWeights = ConvertedWeights()

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
        with Weights(spec.folder, spec.tensor_renames, spec.quantization, merge) as weights:
            chosen = kernels.choose(device, dtype)
            int8 = quantizes_vision_encoder(config, chosen)
            # Merged weights belong to an adapter, of which there may be many.
            keeps = int8 and keeps_outputs(spec.pooling)
            part = "vision with wide outputs" if keeps else "vision"
            stored = ConvertedWeights() if merge else ConvertedWeights.open(weights, config, chosen, part)
            with stored as converted:
                yield cls(weights, chosen, device, dtype, int8, keeps, converted)
        if merge:
            merge.check_complete()

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self.weights.tensor(f"visual.{name}", shape, device=self.device, dtype=self.dtype)

    def linear(
        self, names: Sequence[str], outputs: int, inputs: int, activation: Activation = Activation.NONE
    ) -> Linear:
        """Read a linear layer of the blocks or the merger, which may be quantized. Several with `outputs` outputs each
        become one layer."""
        modules = [f"visual.{name}" for name in names]
        counts = [outputs] * len(names)
        bias = torch.cat([self.tensor(f"{name}.bias", outputs) for name in names])
        quantization = INT8 if self.int8 else None

        def create() -> Linear:
            weight = self.weights.matrix(
                modules, counts, inputs, device=self.device, dtype=self.dtype, mapped=self.kernels.copies_weights
            )
            return create_linear(
                self.kernels, weight, bias, dtype=self.dtype, activation=activation, quantization=quantization
            )

        name = layer_name(modules, (sum(counts), inputs), activation, quantization, "")
        return self.converted.linear(name, create, bias, activation=activation)

    def block_output(self, name: str, outputs: int, inputs: int) -> Linear:
        """Read a layer of a block whose results are added to hidden states."""
        return self._replace(int8=self.int8 and not self.keeps_outputs).linear([name], outputs, inputs)

    def output(self, name: str, outputs: int, inputs: int) -> Linear:
        """Read the layer whose results are the visual tokens. It is not quantized: its rounding errors would be larger
        than those of all other layers together, and it has less than 1 % of the multiplications."""
        return self._replace(int8=False).linear([name], outputs, inputs)


class VisionLayout(NamedTuple):
    """How a family names the tensors of its vision encoder, and which biases there are.

    Attributes:
        up: the layers of a block's MLP before its activation.
        down: the layer after it.
        merger: the norm and the two layers of a merger.
        norm_bias: whether norms have biases: LayerNorm instead of RMSNorm.
        patch_bias: whether the convolution has a bias.
    """

    up: tuple[str, ...] = ("mlp.fc1",)
    down: str = "mlp.fc2"
    merger: tuple[str, str, str] = ("ln_q", "mlp.0", "mlp.2")
    norm_bias: bool = True
    patch_bias: bool = False


def load_vision_model(
    model: Callable[..., ModelT],
    config: VisionConfig,
    read: VisionWeights,
    layout: VisionLayout,
    *,
    deepstack: Mapping[int, str] = {},
    **more: object,
) -> ModelT:
    """Load the vision encoder of an opened checkpoint in parts, so that other work may run in between.

    Args:
        model: the class.
        config: its configuration.
        read: the opened checkpoint.
        layout: the names of the tensors.
        deepstack: the names of the mergers of earlier blocks, which normalize whole merge units.
        more: the attributes that only this class has.

    Raises:
        CheckpointError: a tensor is missing or has an unexpected shape.
    """
    loader = _Loader(config, read, layout)
    run = executor_for(read.device).run
    with Progress(range(config.depth), desc="Loading layers of the vision encoder", unit="") as numbers:
        blocks = [run(functools.partial(loader.block, f"blocks.{number}")) for number in numbers]
    return model(
        config=config,
        kernels=read.kernels,
        device=torch.device(read.device),
        dtype=read.dtype,
        patch_embed=run(loader.patch_embed),
        blocks=blocks,
        merger=run(functools.partial(loader.merger, "merger", config.hidden_size)),
        deepstack={
            number: run(functools.partial(loader.merger, name, config.merge_width))
            for number, name in deepstack.items()
        },
        **more,
    )


class _Loader(NamedTuple):
    config: VisionConfig
    read: VisionWeights
    layout: VisionLayout

    def patch_embed(self) -> Linear:
        config = self.config
        patch = (3, config.temporal_patch_size, config.patch_size, config.patch_size)
        weight = self.read.tensor("patch_embed.proj.weight", config.hidden_size, *patch).flatten(1)
        bias = self.read.tensor("patch_embed.proj.bias", config.hidden_size) if self.layout.patch_bias else None
        return self.read.kernels.linear(weight, bias)

    def block(self, name: str) -> Block:
        read = self.read
        width = self.config.hidden_size
        inner = self.config.intermediate_size
        up = [f"{name}.{part}" for part in self.layout.up]
        return Block(
            norm1=self._norm(f"{name}.norm1", width),
            qkv=read.linear([f"{name}.attn.qkv"], 3 * width, width),
            proj=read.block_output(f"{name}.attn.proj", width, width),
            norm2=self._norm(f"{name}.norm2", width),
            up=read.linear(up, inner, width, ACTIVATIONS[self.config.hidden_act]),
            down=read.block_output(f"{name}.{self.layout.down}", width, inner),
        )

    def merger(self, name: str, norm_width: int) -> Merger:
        norm, fc1, fc2 = (f"{name}.{part}" for part in self.layout.merger)
        width = self.config.merge_width
        return Merger(
            norm=self._norm(norm, norm_width),
            fc1=self.read.linear([fc1], width, width, Activation.GELU),
            fc2=self.read.output(fc2, self.config.output_size, width),
        )

    def _norm(self, name: str, width: int) -> Norm:
        weight = self.read.tensor(f"{name}.weight", width)
        return Norm(weight, self.read.tensor(f"{name}.bias", width) if self.layout.norm_bias else None)
