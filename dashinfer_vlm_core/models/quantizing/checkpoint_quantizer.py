"""Write checkpoints with 4-bit weights in the format compressed-tensors.

As with `quantization` int4, the first and the last layer of the text model have 8 bits. The vision encoder, the
embedding table, the output layer and the head for multi-token prediction are copied, as in published checkpoints.

* 4 bits (`pack-quantized`): `weight_packed` int32 [outputs, inputs / 8], the codes of eight inputs, the first one in
  the lowest bits; `weight_scale` [outputs, groups] in the model's dtype; `weight_zero_point` int32
  [outputs / 8, groups], packed along the outputs; `weight_shape`.
* 8 bits (`int-quantized`): `weight` int8 [outputs, inputs]; `weight_scale` [outputs, 1], likewise. The configuration
  declares activations rounded to 8 bits per token, because vLLM has no kernel for CPUs that multiplies 8-bit weights by
  other activations.

Source: `compressors/pack_quantized` and `quantization/quant_args.py` of compressed-tensors 0.17.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import CheckpointError, ConfigError
from ...kernels.quantization import GROUPS, QuantizedWeight, has_8_bits, int8_codes, quantize
from ...kernels.recording import LayerInput
from ...text_spec import AttentionSpec, MlpSpec, TextModelSpec
from ..files import stored_tensors
from ..spec import ModelSpec
from .checkpoint_copy import check_unquantized, copy_checkpoint, read_config
from .gptq import Compensator

CODES_PER_INT32 = 8


class Calibration(Protocol):
    """The inputs of layers in calibration requests."""

    def products(self, layer: LayerInput) -> Tensor:
        """Return the sum of the outer products of the inputs, float32 [inputs, inputs]."""


class _Matrix(NamedTuple):
    """A matrix to quantize.

    Attributes:
        input: its input.
        bits: 4 or 8.
    """

    input: LayerInput
    bits: int


class CheckpointQuantizer:
    """Writes a quantized copy of a checkpoint.

    Args:
        spec: the checkpoint.
        group: number of inputs that share a scale, one of `GROUPS`.
        calibration: compensates rounding errors with it; None to round to the nearest code.

    Raises:
        CheckpointError: the weights are quantized already.
        ConfigError: the text model is not supported.
        ValueError: `group` is not in `GROUPS`.
    """

    def __init__(self, spec: ModelSpec, group: int, calibration: Calibration | None = None) -> None:
        check_can_quantize(spec)
        if group not in GROUPS:
            raise ValueError(f"`group` must be one of {', '.join(map(str, GROUPS))}, got {group}.")
        self._spec = spec
        self._group = group
        self._calibration = calibration
        self._matrices = _matrices(spec.text)
        self._compensators: dict[LayerInput, Compensator] = {}
        self.num_tensors: int = len(stored_tensors(spec.folder, spec.tensor_renames))

    @property
    def num_quantized(self) -> int:
        """Number of quantized matrices."""
        return len(self._matrices)

    def write(self, folder: Path, advance: Callable[[], None] = lambda: None) -> None:
        """Write the copy into an existing, empty folder; see `copy_checkpoint`."""
        settings = quantization_config(self._spec.text, self._group)
        config = read_config(self._spec.folder) | {"quantization_config": settings}
        copy_checkpoint(self._spec, folder, self._convert, config, advance)

    def _convert(self, name: str, stored: str, tensor: Tensor) -> Mapping[str, Tensor]:
        module, _, kind = name.rpartition(".")
        matrix = self._matrices.get(module) if kind == "weight" else None
        if matrix is None:
            return {stored: tensor}
        if tensor.ndim != 2 or not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            raise CheckpointError(
                f"Tensor {stored!r} is not a matrix of finite numbers. Copy or download the checkpoint again."
            )
        parts = self._packed_8_bits(tensor) if matrix.bits == 8 else self._packed_4_bits(name, tensor, matrix.input)
        return {stored.removesuffix("weight") + part: packed for part, packed in parts.items()}

    def _packed_8_bits(self, tensor: Tensor) -> dict[str, Tensor]:
        codes, scales = int8_codes(tensor)
        return {"weight": codes, "weight_scale": scales.to(tensor.dtype)}

    def _packed_4_bits(self, name: str, tensor: Tensor, layer: LayerInput) -> dict[str, Tensor]:
        if tensor.shape[1] % self._group:
            raise ConfigError(
                f"`--group-size` {self._group} does not divide the {tensor.shape[1]} inputs of {name!r}. Choose a"
                " smaller one.",
                param="group_size",
            )
        weight = self._rounded(tensor, layer)
        return {
            "weight_packed": pack_codes(weight.codes),
            "weight_scale": weight.scales.to(tensor.dtype),
            "weight_zero_point": pack_codes(weight.zeros.T).T,
            "weight_shape": torch.tensor(tensor.shape),
        }

    def _rounded(self, tensor: Tensor, layer: LayerInput) -> QuantizedWeight:
        if self._calibration is None:
            return quantize(tensor, self._group)
        if all(other.layer != layer.layer for other in self._compensators):
            self._compensators.clear()
        if layer not in self._compensators:  # matrices of a layer share inputs
            self._compensators[layer] = Compensator(self._calibration.products(layer))
        return self._compensators[layer].quantize(tensor, self._group)


def check_can_quantize(spec: ModelSpec) -> None:
    """Check that the weights of a model can be quantized.

    Raises:
        CheckpointError: they are quantized already.
        ConfigError: the text model is not supported.
    """
    check_unquantized(spec)
    if any(not isinstance(layer.mlp, MlpSpec) for layer in spec.text.layers):
        raise ConfigError(
            f"{spec.folder} has a mixture of experts, which `quantize` does not support. Use `--quantization int4` at"
            " start.",
            param="model",
        )


def pack_codes(codes: Tensor) -> Tensor:
    """Pack uint8 [rows, columns] with 4 bits each into int32 [rows, columns / 8], the first one in the lowest bits."""
    padded = F.pad(codes, (0, -codes.shape[1] % CODES_PER_INT32))
    pairs = padded[:, ::2] | padded[:, 1::2] << 4
    return pairs.contiguous().view(torch.int32)


def quantization_config(text: TextModelSpec, group: int) -> dict[str, Any]:
    """Return `quantization_config` of the `config.json` of a quantized checkpoint."""
    count = len(text.layers)
    outer = [number for number in range(count) if has_8_bits(number, count)]
    groups = [_int4_group(group)]
    if outer:
        groups.insert(0, _int8_group([rf"re:.*\.layers\.({'|'.join(map(str, outer))})\..*_(proj|qkv|z)$"]))
    gates = (text.weights.delta_beta, text.weights.delta_step)
    ignored = [rf"re:.*\.{name}$" for name in gates] if text.delta_net else []
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if outer else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {f"group_{index}": each for index, each in enumerate(groups)},
        "ignore": ["lm_head", r"re:.*visual\..*", r"re:mtp\..*", *ignored],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _int4_group(size: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": size}
    return {
        "format": "pack-quantized",
        "targets": ["Linear"],
        "weights": {**weights, "dynamic": False},
        "input_activations": None,
        "output_activations": None,
    }


def _int8_group(targets: list[str]) -> dict[str, Any]:
    bits = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "format": "int-quantized",
        "targets": targets,
        "weights": {**bits, "strategy": "channel", "dynamic": False},
        "input_activations": {**bits, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }


def _matrices(text: TextModelSpec) -> dict[str, _Matrix]:
    names = text.weights
    found: dict[str, _Matrix] = {}
    for number, layer in enumerate(text.layers):
        is_attention = isinstance(layer.mixer, AttentionSpec)
        mixer = (names.query, names.key, names.value) if is_attention else (names.delta_qkv, names.delta_z)
        output = names.output if is_attention else names.delta_output
        kinds = {"mixer": mixer, "output": (output,), "mlp": (names.gate, names.up), "down": (names.down,)}
        bits = 8 if has_8_bits(number, len(text.layers)) else 4
        prefix = names.layer.format(number)
        for kind, modules in kinds.items():
            matrix = _Matrix(LayerInput(number, kind), bits)
            found |= {f"{prefix}.{module}": matrix for module in modules}
    return found
