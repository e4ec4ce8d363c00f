"""LoRA folders in PEFT's format with random weights, and the checkpoints that merging them results in."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def write_lora(
    folder: Path,
    base: Path,
    targets: Sequence[str],
    *,
    rank: int = 4,
    seed: int = 1,
    saved: Iterable[str] = (),
    published_names: bool = False,
    ranks: dict[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write a LoRA folder for the checkpoint `base`.

    Args:
        folder: the folder to create.
        base: the checkpoint.
        targets: last parts of the names of linear layers, or `embed_tokens`.
        rank: `r`; `lora_alpha` is twice as much unless `config` has it.
        seed: of the random weights.
        saved: last parts of the names of modules that were trained completely.
        published_names: whether to use the module names of older versions of transformers.
        ranks: `rank_pattern`.
        dtype: of the factors.
        config: other fields of `adapter_config.json`.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in _weights(base).items():
        module, kind = name.rsplit(".", 1)
        last = module.rsplit(".", 1)[-1]
        path = PREFIX + (_published_name(module) if published_names else _current_name(module))
        if last in saved:
            noise = torch.randn(weight.shape, generator=generator)
            tensors[f"{path}.{kind}"] = weight + 0.2 * (float(weight.std()) or 1.0) * noise
        if last not in targets or kind != "weight":
            continue
        r = _by_suffix(ranks or {}, module, rank)
        outputs, inputs = reversed(weight.shape) if last == "embed_tokens" else weight.shape
        a = torch.randn(r, inputs, generator=generator) / math.sqrt(inputs)
        b = torch.randn(outputs, r, generator=generator) / (2 * math.sqrt(r))
        infix = "lora_embedding_{}" if last == "embed_tokens" else "lora_{}.weight"
        tensors[f"{path}.{infix.format('A')}"], tensors[f"{path}.{infix.format('B')}"] = a.to(dtype), b.to(dtype)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        "modules_to_save": list(saved) or None,
        "rank_pattern": ranks or {},
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def merge_lora(folder: Path, base: Path, lora: Path) -> Path:
    """Write the checkpoint `base` with the adapter's weights, merged in float64, to `folder`."""
    shutil.copytree(base, folder)
    settings = json.loads((lora / "adapter_config.json").read_text())
    weights, tensors = _weights(base), load_file(lora / "adapter_model.safetensors")
    found = {key.removeprefix(PREFIX): value for key, value in tensors.items()}
    for name in weights:
        module, kind = name.rsplit(".", 1)
        for path in {module, _current_name(module)}:
            if (saved := found.get(f"{path}.{kind}")) is not None:
                weights[name] = saved
            for a_name, b_name in (("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")):
                if kind != "weight" or (a := found.get(f"{path}.{a_name}")) is None:
                    continue
                b = found[f"{path}.{b_name}"]
                alpha = _by_suffix(settings.get("alpha_pattern") or {}, module, settings["lora_alpha"])
                scale = alpha / (math.sqrt(len(a)) if settings["use_rslora"] else len(a))
                delta = scale * (b.double() @ a.double())
                weights[name] = (weights[name] + (delta.T if "embedding" in a_name else delta)).float()
    contiguous = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})
    return folder


def _weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors")


def _current_name(module: str) -> str:
    """Return the name of a module in transformers' model since version 4.52."""
    if module.startswith(("model.language_model.", "model.visual.", "lm_head")):
        return module
    return f"model.{module}" if module.startswith("visual.") else re.sub(r"^model\.", "model.language_model.", module)


def _published_name(module: str) -> str:
    """Return the name of a module in the published checkpoints."""
    return re.sub(r"^model\.(language_model\.|visual\.)", _published_prefix, module)


def _published_prefix(match: re.Match[str]) -> str:
    return "visual." if match[1] == "visual." else "model."


def _by_suffix(values: dict[str, Any], module: str, default: Any) -> Any:
    return next((value for suffix, value in values.items() if f".{module}".endswith(f".{suffix}")), default)
