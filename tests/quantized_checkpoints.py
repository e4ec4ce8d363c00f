"""Write quantized checkpoints in the layouts of other projects. It shares no code with the readers of this project.

Each checkpoint has a twin: the same model with the weights that the quantized ones represent, unquantized.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file

TEXT_LAYERS = r"layers\.\d+\.(self_attn|mlp).*_proj$"
VISION_BLOCKS = r"visual\.blocks\.\d+\..*(qkv|proj|fc1|fc2)$"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP8_MAX = 448.0


@dataclass(frozen=True)
class Packed:
    """A packed matrix: its tensors by their names within the module, and the weights that they represent."""

    tensors: dict[str, torch.Tensor]
    weight: torch.Tensor


@dataclass(frozen=True)
class Layout:
    """A layout of quantized checkpoints: `quantization_config`, and how a matrix [outputs, inputs] is packed."""

    config: dict[str, Any]
    pack: Callable[[np.ndarray], Packed]


@dataclass(frozen=True)
class Rounded:
    """Integer codes [outputs, inputs], and scales and zero points [outputs, groups]; `numbers` is the group of each
    input."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    numbers: np.ndarray

    @property
    def weight(self) -> torch.Tensor:
        steps = (self.codes - self.zeros[:, self.numbers]).astype(np.float32)
        return torch.from_numpy(steps * self.scales.astype(np.float32)[:, self.numbers])


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack unsigned codes [rows, columns] into int32 [rows, columns * bits / 32], low bits first."""
    per, (rows, columns) = 32 // bits, codes.shape
    padded = np.zeros((rows, -(-columns // per) * per), dtype=np.uint32)
    padded[:, :columns] = codes
    words = np.zeros((rows, padded.shape[1] // per), dtype=np.uint32)
    for place in range(per):
        words |= padded[:, place::per] << np.uint32(bits * place)
    return words.view(np.int32)


def round_weight(
    weight: np.ndarray, bits: int, numbers: np.ndarray, *, symmetric: bool, min_zero: int = 0, dtype: Any = np.float16
) -> Rounded:
    """Round a matrix to the nearest codes; scales are rounded to `dtype`."""
    top, groups = 2**bits - 1, int(numbers.max()) + 1
    parts = [weight[:, numbers == number] for number in range(groups)]
    low = np.stack([np.minimum(part.min(1), 0) for part in parts], axis=1)
    high = np.stack([np.maximum(part.max(1), 0) for part in parts], axis=1)
    if symmetric:
        scales = (np.maximum(-low, high) / (top // 2)).astype(dtype)
        zeros = np.full(scales.shape, (top + 1) // 2)
    else:
        scales = ((high - low) / top).astype(dtype)
        zeros = np.clip((-low / scales.astype(np.float32)).round(), min_zero, top).astype(np.int64)
    steps = (weight / scales.astype(np.float32)[:, numbers]).round()
    codes = np.clip(steps + zeros[:, numbers], 0, top).astype(np.int64)
    return Rounded(codes, scales, zeros, numbers)


def groups_of(inputs: int, group: int) -> np.ndarray:
    """Return the group of each input, in the natural order; -1 is one group."""
    return np.arange(inputs) // (inputs if group == -1 else group)


def pack_awq(weight: np.ndarray, *, group: int) -> Packed:
    rounded = round_weight(weight, 4, groups_of(weight.shape[1], group), symmetric=False)

    def packed(columns: np.ndarray) -> torch.Tensor:
        eights = columns.reshape(len(columns), -1, 8)[:, :, AWQ_ORDER]
        return torch.from_numpy(pack(eights.reshape(len(columns), -1), 4))

    tensors = {
        "qweight": packed(rounded.codes.T),
        "qzeros": packed(rounded.zeros.T),
        "scales": torch.from_numpy(rounded.scales.T.copy()),
    }
    return Packed(tensors, rounded.weight)


def pack_gptq(
    weight: np.ndarray, *, bits: int, group: int, symmetric: bool, version: int, ordered: bool = False, seed: int = 0
) -> Packed:
    inputs = weight.shape[1]
    numbers = groups_of(inputs, group)
    if ordered:  # matrices with the same inputs share the order, unless they have different seeds
        numbers = np.random.default_rng(inputs + seed).permutation(numbers)
    stored_minus = 1 if version == 1 else 0
    rounded = round_weight(weight, bits, numbers, symmetric=symmetric, min_zero=stored_minus)
    tensors = {
        "qweight": torch.from_numpy(pack(rounded.codes, bits).T.copy()),
        "qzeros": torch.from_numpy(pack(rounded.zeros.T - stored_minus, bits)),
        "scales": torch.from_numpy(rounded.scales.T.copy()),
        "g_idx": torch.from_numpy(numbers.astype(np.int32)),
    }
    return Packed(tensors, rounded.weight)


def pack_integers(
    weight: np.ndarray, *, bits: int, group: int, symmetric: bool = True, packed: bool = True, ordered: bool = False
) -> Packed:
    """Pack a matrix as compressed-tensors does; without `packed`, weights are int8."""
    outputs, inputs = weight.shape
    numbers = groups_of(inputs, group)
    if ordered:
        numbers = np.random.default_rng(inputs).permutation(numbers)
    rounded = round_weight(weight, bits, numbers, symmetric=symmetric)
    tensors = {"weight_scale": torch.from_numpy(rounded.scales)}
    if packed:
        tensors["weight_packed"] = torch.from_numpy(pack(rounded.codes, bits))
        tensors["weight_shape"] = torch.tensor([outputs, inputs])
    else:
        tensors["weight"] = torch.from_numpy((rounded.codes - 2 ** (bits - 1)).astype(np.int8))
    if not symmetric:
        tensors["weight_zero_point"] = torch.from_numpy(pack(rounded.zeros.T, bits).T.copy())
    if ordered:
        tensors["weight_g_idx"] = torch.from_numpy(numbers.astype(np.int32))
    return Packed(tensors, rounded.weight)


def pack_fp8(weight: np.ndarray, *, scales: str, block: tuple[int, int] | None) -> Packed:
    """Pack a matrix with one scale per block; a block of (0, 0) is the whole matrix, None is one output."""
    outputs, inputs = weight.shape
    rows, columns = (1, inputs) if block is None else block
    rows, columns = rows or outputs, columns or inputs
    grid = np.zeros((-(-outputs // rows), -(-inputs // columns)), dtype=np.float32)
    for row, column in np.ndindex(*grid.shape):
        part = weight[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns]
        grid[row, column] = np.abs(part).max() / FP8_MAX
    stored = torch.from_numpy(grid).bfloat16()
    expanded = stored.float().repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]
    codes = (torch.from_numpy(weight) / expanded).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    if block == (0, 0):
        stored = stored.reshape(1)
    return Packed({"weight": codes, scales: stored}, codes.float() * expanded)


def _compressed(layout: str, weights: dict[str, Any]) -> dict[str, Any]:
    activations = None
    if layout != "pack-quantized":
        activations = {"num_bits": 8, "type": weights.get("type", "int"), "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*visual.*"],
        "config_groups": {"group_0": group},
    }


_AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True, "modules_to_not_convert": ["visual"]}
_GPTQ = {"quant_method": "gptq", "checkpoint_format": "gptq", "lm_head": False, "true_sequential": True}
_PARTIAL = functools.partial


def layouts(*, group: int, block: tuple[int, int]) -> dict[str, Layout]:
    """Return all layouts by name, with groups of `group` inputs and blocks of `block` outputs and inputs."""
    return {
        "awq": Layout(_AWQ | {"group_size": group}, _PARTIAL(pack_awq, group=group)),
        "awq-one-group": Layout(_AWQ | {"group_size": -1}, _PARTIAL(pack_awq, group=-1)),
        "gptq": Layout(
            _GPTQ | {"bits": 4, "group_size": group, "sym": True, "desc_act": False},
            _PARTIAL(pack_gptq, bits=4, group=group, symmetric=True, version=1),
        ),
        "gptq-asymmetric": Layout(
            _GPTQ | {"bits": 4, "group_size": 2 * group, "sym": False, "desc_act": False},
            _PARTIAL(pack_gptq, bits=4, group=2 * group, symmetric=False, version=1),
        ),
        "gptq-act-order": Layout(
            _GPTQ | {"bits": 4, "group_size": group, "sym": True, "desc_act": True},
            _PARTIAL(pack_gptq, bits=4, group=group, symmetric=True, version=1, ordered=True),
        ),
        "gptq-v2": Layout(
            _GPTQ | {"bits": 4, "group_size": group, "sym": False, "desc_act": False, "checkpoint_format": "gptq_v2"},
            _PARTIAL(pack_gptq, bits=4, group=group, symmetric=False, version=2),
        ),
        "gptq-int8": Layout(
            _GPTQ | {"bits": 8, "group_size": group, "sym": True, "desc_act": False},
            _PARTIAL(pack_gptq, bits=8, group=group, symmetric=True, version=1),
        ),
        "gptq-int8-one-group": Layout(
            _GPTQ | {"bits": 8, "group_size": -1, "sym": True, "desc_act": False},
            _PARTIAL(pack_gptq, bits=8, group=-1, symmetric=True, version=1),
        ),
        "int4": Layout(
            _compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}),
            _PARTIAL(pack_integers, bits=4, group=group),
        ),
        "int4-asymmetric": Layout(
            _compressed(
                "pack-quantized",
                {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": False},
            ),
            _PARTIAL(pack_integers, bits=4, group=group, symmetric=False),
        ),
        "int4-act-order": Layout(
            _compressed(
                "pack-quantized",
                {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "actorder": "group"},
            ),
            _PARTIAL(pack_integers, bits=4, group=group, ordered=True),
        ),
        "int8-packed": Layout(
            _compressed("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
            _PARTIAL(pack_integers, bits=8, group=-1),
        ),
        "int8": Layout(
            _compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
            _PARTIAL(pack_integers, bits=8, group=-1, packed=False),
        ),
        "fp8-output": Layout(
            _compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
            _PARTIAL(pack_fp8, scales="weight_scale", block=None),
        ),
        "fp8-tensor": Layout(
            _compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
            _PARTIAL(pack_fp8, scales="weight_scale", block=(0, 0)),
        ),
        "fp8-block": Layout(
            {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)},
            _PARTIAL(pack_fp8, scales="weight_scale_inv", block=block),
        ),
    }


LAYOUTS: dict[str, Layout] = layouts(group=32, block=(48, 40))
"""Published groups and blocks are 128; these are smaller, so that tiny models have several."""


@dataclass(frozen=True)
class Written:
    """A quantized checkpoint, and its unquantized twin."""

    quantized: Path
    twin: Path


def write_quantized(
    source: Path,
    folder: Path,
    layout: Layout,
    *,
    modules: str = TEXT_LAYERS,
    experts: Literal["separate", "fused", "transposed"] = "separate",
) -> Written:
    """Quantize the matrices of a checkpoint in float32 whose module names match `modules`.

    Args:
        source: the checkpoint.
        folder: where both checkpoints are written.
        layout: one of `LAYOUTS`.
        modules: a regular expression.
        experts: whether the experts of a layer, FP8 only, stay one tensor [experts, outputs, inputs], or `transposed`,
            as published, [experts, inputs, outputs].
    """
    written = Written(folder / "quantized", folder / "twin")
    for target in (written.quantized, written.twin):
        shutil.copytree(source, target)
    quantized: dict[str, torch.Tensor] = {}
    twin: dict[str, torch.Tensor] = {}
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items() if experts != "separate" else _separate_experts(tensors):
        if ".experts." in name and tensor.ndim == 3 and experts != "separate":
            packed = [layout.pack(expert.float().numpy()) for expert in tensor]
            for part, suffix in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
                stack = torch.stack([expert.tensors[part] for expert in packed])
                quantized[name + suffix] = (stack.transpose(1, 2) if experts == "transposed" else stack).contiguous()
            twin[name] = torch.stack([expert.weight for expert in packed])
            continue
        module, _, kind = name.rpartition(".")
        if kind != "weight" or not re.search(modules, module):
            quantized[name] = twin[name] = tensor
            continue
        packed = layout.pack(tensor.float().numpy())
        quantized |= {f"{module}.{part}": stored.contiguous() for part, stored in packed.tensors.items()}
        twin[name] = packed.weight.contiguous()
    save_file(quantized, written.quantized / "model.safetensors", metadata={"format": "pt"})
    save_file(twin, written.twin / "model.safetensors", metadata={"format": "pt"})
    write_config(written.quantized, quantization_config=layout.config)
    return written


def write_config(folder: Path, **fields: Any) -> None:
    """Change fields of a checkpoint's `config.json`."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def _separate_experts(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors; those of fused experts [experts, outputs, inputs] as modules of their own."""
    for name, tensor in tensors.items():
        prefix, fused, kind = name.partition(".experts.")
        if not fused or tensor.ndim != 3:
            yield name, tensor
            continue
        for number, expert in enumerate(tensor):
            parts = expert.chunk(2) if kind == "gate_up_proj" else [expert]
            names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for part, weight in zip(names, parts, strict=True):
                yield f"{prefix}.experts.{number}.{part}.weight", weight.contiguous()
