"""Rotate the hidden states of a checkpoint, so that no input of a layer is much larger than the others.

An orthogonal matrix is folded into all weights that read or write hidden states, and one for each head into the value
and output projections. Results stay the same, up to rounding, and nothing is computed in addition: RMSNorm without
weights commutes with rotations, so its weights are folded into the layers that follow it. The output layer gets a
matrix of its own.

Sources: QuaRot (arXiv:2404.00456, section 4, stages 1a and 1c) and SpinQuant (arXiv:2405.16406, R1 and R2), without the
rotations that are computed at run time. Random signs: QuIP# (arXiv:2402.04396, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import ConfigError
from ...text_spec import AttentionSpec, LayerSpec, MlpSpec, TextModelSpec
from ..spec import ROTATION, ModelSpec
from ..weights import Weights
from .checkpoint_copy import check_unquantized, copy_checkpoint, read_config

SEED = 0


def hadamard(size: int) -> Tensor:
    """Return an orthogonal matrix, float64 [size, size], whose elements have about the same magnitude.

    It is a Hadamard matrix if `size` is a power of two, and else the Kronecker product of that of the largest power of
    two that divides it and a matrix of the Hartley transform.
    """
    power = size & -size
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < power:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    numbers = torch.arange(size // power, dtype=torch.float64)
    angles = 2 * math.pi / len(numbers) * torch.outer(numbers, numbers)
    return torch.kron(angles.cos() + angles.sin(), matrix) / math.sqrt(size)


def rotation(size: int, seed: int) -> Tensor:
    """Return `hadamard(size)` with random signs of its rows, float32."""
    signs = torch.randint(2, (size, 1), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return (signs * hadamard(size)).float()


def check_can_rotate(spec: ModelSpec) -> None:
    """Check that the hidden states of a model can be rotated.

    Raises:
        ConfigError: the message names what prevents it.
        CheckpointError: the weights are quantized.
    """
    check_unquantized(spec)
    text = spec.text
    reason = ""
    if spec.rotated:
        reason = "its hidden states are rotated already"
    elif text.norm != "rms_norm":
        reason = f"its norms are {text.norm}, which subtracts the mean"
    elif any(not isinstance(layer.mlp, MlpSpec) for layer in text.layers):
        reason = "it has a mixture of experts"
    elif not spec.visual_outputs:
        reason = f"the family {spec.model_type} does not name the layers that write visual tokens"
    elif spec.pooling:
        reason = f"its task is {spec.pooling.task}, and embeddings are hidden states"
    if reason:
        raise ConfigError(f"{spec.folder} cannot be rotated: {reason}. Leave out `--rotate`.", param="rotate")


class _Fold(NamedTuple):
    """How a tensor changes.

    Attributes:
        norm: the norm whose weights multiply its inputs; empty for none.
        reads: whether its inputs are hidden states.
        writes: whether its outputs are hidden states.
        value_heads: number of value heads that its outputs are; 0 if they are none.
        mixed_heads: number of heads that its inputs are; 0 if they are none.
    """

    norm: str = ""
    reads: bool = False
    writes: bool = False
    value_heads: int = 0
    mixed_heads: int = 0


class CheckpointRotator:
    """Writes a copy of a checkpoint with rotated hidden states.

    Args:
        spec: the checkpoint.

    Raises:
        ConfigError: its hidden states cannot be rotated.
    """

    def __init__(self, spec: ModelSpec) -> None:
        check_can_rotate(spec)
        self._spec = spec
        self._weights = Weights(spec.folder, spec.tensor_renames)
        self._hidden = rotation(spec.hidden_size, SEED)
        self._head = rotation(spec.text.attention.head_dim, SEED + 1)
        self._folds = _folds(spec)

    @property
    def num_tensors(self) -> int:
        """Number of tensors that `write` reads."""
        return len(self._weights.names)

    def write(self, folder: Path, advance: Callable[[], None] = lambda: None) -> None:
        """Write the copy into an existing, empty folder; see `copy_checkpoint`.

        The head for multi-token prediction is left out: it normalizes hidden states after the weights of the final
        norm, which are folded into the output layer.
        """
        copy_checkpoint(self._spec, folder, self._convert, self._config(), advance)

    def _config(self) -> dict[str, Any]:
        config = read_config(self._spec.folder) | {"tie_word_embeddings": False, ROTATION: "hadamard"}
        if isinstance(config.get("text_config"), dict):
            config["text_config"] = config["text_config"] | {"tie_word_embeddings": False}
        return config

    def _convert(self, name: str, stored: str, tensor: Tensor) -> Mapping[str, Tensor]:
        text = self._spec.text
        names = text.weights
        module, _, kind = name.rpartition(".")
        if name.startswith(f"{names.mtp}."):
            return {}
        if module == names.head and text.tie_word_embeddings:
            return {}  # some files repeat the embedding table
        if module in _norms(text):
            return {stored: torch.full_like(tensor, 1 - text.norm_offset)}
        if module == names.embedding:
            rows = {stored: (tensor.float() @ self._hidden).to(tensor.dtype)}
            if text.tie_word_embeddings:
                rows[f"{names.head}.weight"] = self._folded(tensor, _Fold(norm=names.norm, reads=True), kind)
            return rows
        fold = self._folds.get(module)
        return {stored: tensor if fold is None else self._folded(tensor, fold, kind)}

    def _folded(self, tensor: Tensor, fold: _Fold, kind: str) -> Tensor:
        """Return a weight or a bias after the changes of `fold`."""
        x = tensor.float()
        if kind == "weight":
            if fold.norm:
                x = x * self._norm(fold.norm)
            if fold.reads:
                x = x @ self._hidden
            if fold.mixed_heads:
                x = (torch.unflatten(x, 1, (fold.mixed_heads, -1)) @ self._head).flatten(1)
        if fold.writes:
            x = self._hidden.T @ x
        if fold.value_heads:
            x = _rotate_rows(x, self._head, fold.value_heads)
        return x.to(tensor.dtype)

    def _norm(self, name: str) -> Tensor:
        size = (self._spec.hidden_size,)
        weight = self._weights.tensor(f"{name}.weight", size, device="cpu", dtype=torch.float32)
        return weight + self._spec.text.norm_offset


def _rotate_rows(x: Tensor, head: Tensor, count: int) -> Tensor:
    """Rotate each of `count` heads of x [outputs, inputs], or of a bias [outputs]."""
    heads = x.view(count, len(head), -1)
    return (head.T @ heads).view(x.shape)


def _norms(text: TextModelSpec) -> frozenset[str]:
    names = text.weights
    layers = [names.layer.format(number) for number in range(len(text.layers))]
    inner = [f"{layer}.{name}" for layer in layers for name in (names.input_norm, names.mlp_norm)]
    return frozenset([names.norm, *inner])


def _folds(spec: ModelSpec) -> dict[str, _Fold]:
    """Return how the layers change that read or write hidden states, by their names."""
    text = spec.text
    folds = {text.weights.head: _Fold(norm=text.weights.norm, reads=True)}
    folds |= dict.fromkeys(spec.visual_outputs, _Fold(writes=True))
    for number, layer in enumerate(text.layers):
        folds |= _layer_folds(text, text.weights.layer.format(number), layer)
    return folds


def _layer_folds(text: TextModelSpec, prefix: str, layer: LayerSpec) -> dict[str, _Fold]:
    names = text.weights
    mixed = _Fold(norm=f"{prefix}.{names.input_norm}", reads=True)
    mlp = _Fold(norm=f"{prefix}.{names.mlp_norm}", reads=True)
    folds = {names.gate: mlp, names.up: mlp, names.down: _Fold(writes=True)}
    if isinstance(layer.mixer, AttentionSpec):
        # A gate multiplies the elements of a head, which does not commute with a rotation of the head.
        heads = (0, 0) if layer.mixer.gate else (layer.mixer.num_kv_heads, layer.mixer.num_heads)
        folds |= {names.query: mixed, names.key: mixed, names.value: mixed._replace(value_heads=heads[0])}
        folds[names.output] = _Fold(writes=True, mixed_heads=heads[1])
    else:
        folds |= dict.fromkeys((names.delta_qkv, names.delta_z, names.delta_beta, names.delta_step), mixed)
        folds[names.delta_output] = _Fold(writes=True)
    return {f"{prefix}.{name}": fold for name, fold in folds.items()}
