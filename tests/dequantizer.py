"""Read checkpoints in the format compressed-tensors independently of the package, with NumPy, as the format is
described."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

CODES = np.arange(0, 32, 4)
"""The lowest bit of each of the eight codes of an int32."""


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, as they are stored."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def dequantize(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a quantized checkpoint in float32, under their original names, with experts fused."""
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in read_tensors(folder).items():
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = tensor
    weights, others = {}, {}
    for module, tensors in modules.items():
        if "weight_scale" in tensors:
            weights[f"{module}.weight"] = _weight(tensors)
            others |= {f"{module}.bias": tensors["bias"].float()} if "bias" in tensors else {}
        else:
            others |= {f"{module}.{part}".lstrip("."): tensor.float() for part, tensor in tensors.items()}
    return _fused_experts(weights) | others


def write_dequantized(folder: Path, target: Path) -> Path:
    """Write an unquantized checkpoint in float32 with the weights of a quantized one."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    config["dtype"] = config["torch_dtype"] = "float32"
    (target / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in dequantize(folder).items()}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def _weight(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the weights of a module, from its tensors by name."""
    scales = tensors["weight_scale"].float().numpy()
    if "weight_packed" not in tensors:
        assert tensors["weight"].dtype == torch.int8
        return torch.from_numpy(tensors["weight"].numpy().astype(np.float32) * scales)
    outputs, inputs = tensors["weight_shape"].tolist()
    codes = _unpack(tensors["weight_packed"])[:, :inputs]
    zeros = _unpack(tensors["weight_zero_point"].T).T[:outputs]
    groups = np.arange(inputs) // (inputs // scales.shape[1])
    return torch.from_numpy((codes - zeros[:, groups]).astype(np.float32) * scales[:, groups])


def _unpack(packed: torch.Tensor) -> np.ndarray:
    """Unpack codes of 4 bits along the rows, from the lowest bits on."""
    words = np.ascontiguousarray(packed.numpy()).view(np.uint32)
    return ((words[:, :, None] >> CODES) & 15).reshape(len(words), -1).astype(np.int64)


def _fused_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Combine the matrices of experts: [experts, outputs, inputs], with the gate before the up projection."""
    experts: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    others = {}
    for name, weight in weights.items():
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            experts.setdefault(found[1], {}).setdefault(int(found[2]), {})[found[3]] = weight
        else:
            others[name] = weight
    for prefix, matrices in experts.items():
        parts = [matrices[index] for index in range(len(matrices))]
        others[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([p["gate_proj"], p["up_proj"]]) for p in parts])
        others[f"{prefix}.down_proj"] = torch.stack([p["down_proj"] for p in parts])
    return others
