"""The floating-point operations and bytes that a model needs, from its shape."""

from __future__ import annotations

from .checkpoint_files import PIXELS
from .speed_models import SpeedModel

BF16 = 2
"""Bytes of a weight, key or value."""


def tower_flop(model: SpeedModel, patches: int) -> float:
    """Return the floating-point operations of the vision encoder for one image of `patches` patches."""
    width, merged = model.tower_width, 4 * model.tower_width
    columns = 3 * PIXELS["temporal_patch_size"] * PIXELS["patch_size"] ** 2
    block = 2 * patches * 12 * width**2 + 4 * patches**2 * width
    merger = 2 * (patches // 4) * merged * (merged + model.hidden)
    return float(model.tower_layers * block + 2 * patches * columns * width + merger)


def step_bytes(model: SpeedModel, *, sequences: int, context: int) -> float:
    """Return the bytes that a decode step reads: the weights of all layers and the output layer, and the keys and
    values of each sequence.

    Args:
        model: the model.
        sequences: number of sequences in the step.
        context: tokens of each sequence.
    """
    keys = model.kv_heads * model.head_dim
    layer = 2 * model.hidden * (model.hidden + keys) + 3 * model.hidden * model.inner
    weights = model.layers * layer + model.vocabulary * model.hidden
    return float(BF16 * (weights + sequences * context * 2 * keys * model.layers))
