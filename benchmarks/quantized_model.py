"""Quantized copies of checkpoints in published layouts, with the weights rounded to the nearest values."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dashinfer_vlm_core.models.files import SINGLE
from tests.quantized_checkpoints import TEXT_LAYERS, Layout, layouts, write_config

LAYOUTS = layouts(group=128, block=(128, 128))


def write_quantized_model(source: Path, layout: Layout, folder: Path) -> None:
    """Write a quantized copy of an unquantized checkpoint of one file to `folder`."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(SINGLE))
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(source / SINGLE, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - not a dict
            tensor, (module, _, kind) = opened.get_tensor(name), name.rpartition(".")
            if kind != "weight" or not re.search(TEXT_LAYERS, module):
                tensors[name] = tensor
                continue
            for part, stored in layout.pack(tensor.float().numpy()).tensors.items():
                tensors[f"{module}.{part}"] = stored.contiguous()
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    write_config(folder, quantization_config=layout.config)
