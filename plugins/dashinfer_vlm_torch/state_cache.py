"""The recurrent states of all sequences, and their part of the cache's memory."""

from __future__ import annotations

import torch

from dashinfer_vlm_core.kernels.types import RecurrentStates
from dashinfer_vlm_core.text_spec import TextModelSpec


def create_states(config: TextModelSpec, slots: int, *, device: str, dtype: torch.dtype) -> RecurrentStates | None:
    """Create slots, which are written before they are read; None for models without recurrent states.

    On a CPU, the operating system allocates memory when a slot is first written.
    """
    spec = config.delta_net
    if spec is None:
        return None
    layers = config.num_delta_net_layers
    delta = (layers, slots, spec.num_value_heads, spec.key_dim, spec.value_dim)
    return RecurrentStates(
        conv=torch.empty((layers, slots, spec.conv_width - 1, spec.conv_channels), device=device, dtype=dtype),
        delta=torch.empty(delta, device=device, dtype=torch.float32),
    )
