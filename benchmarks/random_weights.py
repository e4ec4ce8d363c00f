"""Write models with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .checkpoint_files import IDS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def save_random_weights(config: PreTrainedConfig, folder: Path) -> None:
    """Write a model with random weights (bfloat16), as transformers writes it."""
    import torch
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = AutoModelForImageTextToText.from_config(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id = [IDS["<|im_end|>"], IDS["<|endoftext|>"]]
    model.generation_config.pad_token_id = IDS["<|endoftext|>"]
    model.save_pretrained(folder)
