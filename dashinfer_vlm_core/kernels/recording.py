"""PyTorch's kernels that record the inputs of the layers of a text model, and its hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .choice import LoadedKernels
from .devices import is_cpu
from .factories import TorchKernelFactory
from .quantization import Quantization
from .torch_kernels import TorchKernels
from .types import (
    Attention,
    DecoderLayer,
    DecoderLayers,
    DecoderShape,
    ForwardBatch,
    Linear,
    LMHead,
    Mlp,
)


class LayerInput(NamedTuple):
    """An input of linear layers.

    Attributes:
        layer: the number of the layer of the text model.
        kind: `mixer`: of attention or of a gated delta net; `output`: of its output projection; `mlp`: of the MLP;
            `down`: of its down projection.
    """

    layer: int
    kind: str


class Recorder:
    """What the kernels record. Used by one thread at a time.

    Attributes:
        layers: the numbers of the layers whose inputs are recorded.
        products: the sum of the outer products of each input's rows, float32 [inputs, inputs].
        keeps_hidden: whether hidden states are recorded.
        hidden: the hidden states after the last layer, [tokens, hidden] for each forward pass.
        head: the output layer.
    """

    def __init__(self) -> None:
        self.layers: frozenset[int] = frozenset()
        self.products: dict[LayerInput, Tensor] = {}
        self.keeps_hidden = False
        self.hidden: list[Tensor] = []
        self.head: LMHead | None = None

    def add(self, key: LayerInput, x: Tensor) -> None:
        """Record the rows of an input."""
        if key.layer not in self.layers:
            return
        rows = x.float()
        if key not in self.products:
            self.products[key] = torch.zeros(rows.shape[1], rows.shape[1])
        self.products[key].addmm_(rows.T, rows)


class RecordingKernelFactory(TorchKernelFactory):
    """See `KernelFactory`. It is used only where `cpu_kernels` names it, on a CPU."""

    name = "recording"
    priority = -1

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def applies(self, device: str, dtype: torch.dtype) -> bool:
        return is_cpu(device)

    def identity(self) -> str:
        return self.name

    def load(self, device: str) -> LoadedKernels:
        return LoadedKernels(RecordingKernels(device, self._recorder))


class RecordingKernels(TorchKernels):
    """See `Kernels`. Weights that others keep in 8 bits are rounded to these."""

    name = "recording"
    supports_int8 = True

    def __init__(self, device: str, recorder: Recorder) -> None:
        super().__init__(device)
        self._recorder = recorder

    def head(self, weight: Tensor, *, quantization: Quantization | None = None) -> LMHead:
        self._recorder.head = super().head(weight, quantization=quantization)
        return self._recorder.head

    def decoder_layers(self, layers: Sequence[DecoderLayer], shape: DecoderShape) -> DecoderLayers:
        recorded = [self._recorded(number, layer) for number, layer in enumerate(layers)]
        return _RecordingLayers(super().decoder_layers(recorded, shape), self._recorder)

    def _recorded(self, number: int, layer: DecoderLayer) -> DecoderLayer:
        def linear(kind: str, inner: Linear) -> Linear:
            return _RecordingLinear(inner, LayerInput(number, kind), self._recorder)

        mixer = layer.mixer
        output = linear("output", mixer.output)
        if isinstance(mixer, Attention):
            mixer = mixer._replace(qkv=linear("mixer", mixer.qkv), output=output)
        else:
            mixer = mixer._replace(qkvz=linear("mixer", mixer.qkvz), output=output)
        mlp = layer.mlp
        if isinstance(mlp, Mlp):
            mlp = Mlp(linear("mlp", mlp.gate_up), linear("down", mlp.down))
        return layer._replace(mixer=mixer, mlp=mlp)


class _RecordingLayers:
    """See `DecoderLayers`. The last layer computes all rows, so that all are recorded."""

    def __init__(self, layers: DecoderLayers, recorder: Recorder) -> None:
        self._layers = layers
        self._recorder = recorder

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        every = torch.arange(len(x), device=x.device)
        hidden = self._layers(x, batch._replace(last=every, last_spans=batch.spans))
        if self._recorder.keeps_hidden:
            self._recorder.hidden.append(hidden.clone())
        return hidden[batch.last]


class _RecordingLinear:
    """See `Linear`."""

    def __init__(self, inner: Linear, key: LayerInput, recorder: Recorder) -> None:
        self._inner = inner
        self._key = key
        self._recorder = recorder

    def __call__(self, x: Tensor, row_bias: Tensor | None = None) -> Tensor:
        self._recorder.add(self._key, x)
        return self._inner(x, row_bias)

    def add_to(self, total: Tensor, x: Tensor, row_bias: Tensor | None = None) -> None:
        self._recorder.add(self._key, x)
        self._inner.add_to(total, x, row_bias)
