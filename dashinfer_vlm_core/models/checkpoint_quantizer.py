"""Write checkpoints with 4-bit or 8-bit weights, in the format compressed-tensors, which vLLM loads too.

The layers of the text model have the weights that `quantization` int4 or int8 results in: with int4, the first and the
last one have 8 bits. The vision encoder, the embedding table and the output layer are copied, as in published
checkpoints.

* 4 bits (`pack-quantized`): `weight_packed` int32 [outputs, inputs / 8], the codes of eight inputs, the first one in
  the lowest bits; `weight_scale` [outputs, groups] in the model's dtype; `weight_zero_point` int32
  [outputs / 8, groups], packed along the outputs; `weight_shape`.
* 8 bits (`int-quantized`): `weight` int8 [outputs, inputs]; `weight_scale` [outputs, 1], likewise. The configuration
  declares activations rounded to 8 bits per token, because vLLM has no kernel for CPUs that multiplies 8-bit weights by
  other activations.

Experts, which the original stores as one tensor, are stored separately, each with the names of an MLP.

Source: `compressors/pack_quantized` and `quantization/quant_args.py` of compressed-tensors 0.17.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError, ConfigError
from ..kernels import INT8, Quantization
from ..kernels.quantization import has_8_bits, int8_codes, quantize
from ..text_spec import ExpertsSpec, TextModelSpec
from .files import INDEX, stored_tensors, unreadable_file_error
from .safetensors_writer import DTYPES, TensorInfo, write_safetensors
from .spec import ModelSpec
from .weights import torch_dtype

CONFIG = "config.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
"""Files with weights, which are not copied: they would still have those of the original."""

CODES_PER_INT32 = 8
FREE_BYTES = 64 << 20
"""Free disk space that remains."""

_STORED_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

Compute: TypeAlias = Callable[[Tensor], Iterable[Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedCheckpoint:
    """A quantized checkpoint.

    Attributes:
        folder: its folder.
        num_quantized: number of quantized matrices.
        original_bytes: size of the original's tensors.
        quantized_bytes: size of its tensors.
        omitted: files with other weights, and folders, of the original that were not copied.
    """

    folder: Path
    num_quantized: int
    original_bytes: int
    quantized_bytes: int
    omitted: tuple[str, ...]


class _Source(NamedTuple):
    """A tensor of the original, and the tensors that replace it.

    Attributes:
        info: the original's tensor.
        infos: the tensors that replace it.
        compute: computes them.
        num_quantized: number of quantized matrices.
    """

    info: TensorInfo
    infos: Sequence[TensorInfo]
    compute: Compute
    num_quantized: int = 0


class _Experts(NamedTuple):
    """A tensor with matrices of all experts of a layer.

    Attributes:
        shape: number of experts, outputs and inputs.
        names: the matrices, each with an equal number of outputs.
    """

    shape: tuple[int, int, int]
    names: tuple[str, ...]


class CheckpointQuantizer:
    """Writes a quantized copy of a checkpoint; reads and writes one tensor at a time.

    Args:
        spec: the checkpoint, whose weights are not quantized.
        quantization: of the layers.

    Attributes:
        num_tensors: number of the original's tensors.

    Raises:
        CheckpointError: a file is missing or damaged, or the weights are quantized already.
        ConfigError: the group size does not divide the number of inputs of a matrix.
    """

    def __init__(self, spec: ModelSpec, quantization: Quantization) -> None:
        self._spec = spec
        self._quantization = quantization
        self._config = _read_config(spec.folder)
        self._files = self._plan()
        self.num_tensors: int = sum(map(len, self._files.values()))

    def write(self, folder: Path, advance: Callable[[], None] = lambda: None) -> QuantizedCheckpoint:
        """Write the quantized checkpoint.

        It is written to a temporary folder next to `folder`, and renamed when it is complete.

        Args:
            folder: a folder that does not exist, or is empty.
            advance: called after each tensor of the original.

        Raises:
            ConfigError: `folder` exists, or the disk is full.
            CheckpointError: a file of the original cannot be read.
        """
        check_output_folder(folder)
        target = folder.absolute()
        draft = target.with_name(f".{target.name}.partial")
        try:
            draft.mkdir(parents=True)
        except FileExistsError:
            raise ConfigError(
                f"{draft} exists: another process is writing it, or was killed. Remove it, or choose another folder."
            ) from None
        except OSError as error:
            raise ConfigError(f"{draft} cannot be created: {error.strerror}. Choose another folder.") from error
        try:
            self._check_free_space(draft)
            omitted = self._write(draft, advance)
            draft.replace(target)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be written: {error}.") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        sources = [source for file in self._files.values() for source in file]
        return QuantizedCheckpoint(
            folder=folder,
            num_quantized=sum(source.num_quantized for source in sources),
            original_bytes=sum(source.info.nbytes for source in sources),
            quantized_bytes=self._quantized_bytes(),
            omitted=omitted,
        )

    def _write(self, folder: Path, advance: Callable[[], None]) -> tuple[str, ...]:
        omitted = _copy_other_files(self._spec.folder, folder, {CONFIG, INDEX, *(file.name for file in self._files)})
        for file, sources in self._files.items():
            infos = [info for source in sources for info in source.infos]
            write_safetensors(folder / file.name, infos, _compute(file, sources, advance))
        if (self._spec.folder / INDEX).exists():
            _write_json(folder / INDEX, self._index())
        settings = quantization_config(self._spec.text, self._quantization)
        _write_json(folder / CONFIG, {**self._config, "quantization_config": settings})
        return omitted

    def _plan(self) -> dict[Path, list[_Source]]:
        """Return what becomes of the tensors of each file."""
        stored = stored_tensors(self._spec.folder, self._spec.tensor_renames)
        infos = {name: _stored_info(file, stored_name) for name, (file, stored_name) in stored.items()}
        sources = self._quantized_sources(infos)
        files: dict[Path, list[_Source]] = {}
        for name, (file, _) in stored.items():
            source = sources.get(name) or _Source(infos[name], (infos[name],), lambda tensor: (tensor,))
            files.setdefault(file, []).append(source)
        return files

    def _quantized_sources(self, infos: Mapping[str, TensorInfo]) -> dict[str, _Source]:
        """Return what becomes of the matrices of the layers, by their names after `ModelSpec.tensor_renames`."""
        text, sources = self._spec.text, dict[str, _Source]()
        for layer in range(text.num_hidden_layers):
            prefix = text.weights.layer.format(layer)
            is_outer = self._quantization.bits == 4 and has_8_bits(layer, text.num_hidden_layers)
            quantization = INT8 if is_outer else self._quantization
            for name in _matrix_names(text, layer):
                path = f"{prefix}.{name}.weight"
                sources[path] = self._quantized_matrix(_find(infos, path), quantization)
            experts = {f"{prefix}.{name}.weight": experts for name, experts in _experts(text, layer).items()}
            # As in the decoder, the shapes of both tensors together show whether they are transposed.
            transposed = any(_find(infos, path).shape != shape for path, (shape, _) in experts.items())
            for path, tensor in experts.items():
                sources[path] = self._quantized_experts(infos[path], tensor, quantization, transposed=transposed)
        return sources

    def _quantized_matrix(self, info: TensorInfo, quantization: Quantization) -> _Source:
        if len(info.shape) != 2:
            raise CheckpointError(f"Tensor {info.name!r} is not a matrix. Copy or download the checkpoint again.")
        outputs, inputs = info.shape
        module = info.name.removesuffix(".weight")
        infos, compute = self._matrix(info, module, (outputs, inputs), quantization)
        return _Source(info, infos, compute, 1)

    def _quantized_experts(
        self, info: TensorInfo, experts: _Experts, quantization: Quantization, *, transposed: bool
    ) -> _Source:
        count, outputs, inputs = experts.shape
        expected = (count, inputs, outputs) if transposed else experts.shape
        if info.shape != expected:
            raise CheckpointError(
                f"Tensor {info.name!r} is {list(info.shape)}, but the configuration requires {list(expected)}."
                " Use config.json and safetensors files of the same checkpoint."
            )
        units, prefix = len(experts.names), info.name.rpartition(".")[0]
        modules = [f"{prefix}.{expert}.{name}" for expert in range(count) for name in experts.names]
        parts = [self._matrix(info, module, (outputs // units, inputs), quantization) for module in modules]
        infos = [part for infos, _ in parts for part in infos]

        def compute(tensor: Tensor) -> Iterator[Tensor]:
            matrices = (part for expert in tensor for part in (expert.T if transposed else expert).chunk(units))
            for matrix, (_, compute_matrix) in zip(matrices, parts, strict=True):
                yield from compute_matrix(matrix)

        return _Source(info, infos, compute, len(modules))

    def _matrix(
        self, info: TensorInfo, module: str, shape: tuple[int, int], quantization: Quantization
    ) -> tuple[Sequence[TensorInfo], Compute]:
        """Return the tensors of one matrix, and the function that computes them."""
        outputs, inputs = shape
        if not info.dtype.is_floating_point:
            raise CheckpointError(f"Tensor {info.name!r} has integers. Copy or download the checkpoint again.")
        dtype, group = torch_dtype(self._spec.dtype), quantization.group
        if quantization.bits == 8:
            infos = [
                TensorInfo(f"{module}.weight", torch.int8, (outputs, inputs)),
                TensorInfo(f"{module}.weight_scale", dtype, (outputs, 1)),
            ]
            return infos, partial(_quantize_int8, info.name, dtype=dtype)
        if inputs % group:
            raise ConfigError(
                f"The group size {group} does not divide the {inputs} inputs of {module!r}. Choose a smaller one, or"
                " int8.",
                param="group_size",
            )
        groups = inputs // group
        infos = [
            TensorInfo(f"{module}.weight_packed", torch.int32, (outputs, inputs // CODES_PER_INT32)),
            TensorInfo(f"{module}.weight_scale", dtype, (outputs, groups)),
            TensorInfo(f"{module}.weight_zero_point", torch.int32, (math.ceil(outputs / CODES_PER_INT32), groups)),
            TensorInfo(f"{module}.weight_shape", torch.int64, (2,)),
        ]
        return infos, partial(_quantize_int4, info.name, group=group, dtype=dtype)

    def _index(self) -> dict[str, Any]:
        files = {
            info.name: file.name for file, sources in self._files.items() for source in sources for info in source.infos
        }
        return {"metadata": {"total_size": self._quantized_bytes()}, "weight_map": files}

    def _quantized_bytes(self) -> int:
        return sum(info.nbytes for sources in self._files.values() for source in sources for info in source.infos)

    def _check_free_space(self, folder: Path) -> None:
        needed, free = self._quantized_bytes() + FREE_BYTES, shutil.disk_usage(folder).free
        if free < needed:
            raise ConfigError(
                f"{folder.parent} has {free / 1e9:.1f} GB of free space, but {needed / 1e9:.1f} GB are needed."
                " Choose a folder on another disk."
            )


def check_output_folder(folder: Path) -> None:
    """Check that a quantized checkpoint can be written to `folder`.

    Raises:
        ConfigError: it exists, and is not an empty folder.
    """
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise ConfigError(f"{folder} exists, and is not overwritten. Choose another folder, or remove it.")


def quantization_config(text: TextModelSpec, quantization: Quantization) -> dict[str, Any]:
    """Return `quantization_config` of the `config.json` of a quantized checkpoint."""
    layers = range(text.num_hidden_layers)
    outer = [layer for layer in layers if quantization.bits == 4 and has_8_bits(layer, len(layers))]
    groups = [_int8_group(["Linear"]) if quantization.bits == 8 else _int4_group(quantization.group)]
    if outer:
        groups.insert(0, _int8_group([rf"re:.*\.layers\.({'|'.join(map(str, outer))})\..*_proj$"]))
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if outer else groups[0]["format"],
        "quantization_status": "compressed",
        "config_groups": {f"group_{index}": group for index, group in enumerate(groups)},
        "ignore": ["lm_head", r"re:.*visual\..*", *([rf"re:.*\.{text.weights.router}$"] if text.experts else [])],
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


def _matrix_names(text: TextModelSpec, layer: int) -> tuple[str, ...]:
    """Return the names of a layer's matrices, without those of experts and the suffix `.weight`."""
    names = text.weights
    attention = (names.query, names.key, names.value, names.output)
    return attention if _expert_sizes(text, layer) else (*attention, names.gate, names.up, names.down)


def _experts(text: TextModelSpec, layer: int) -> dict[str, _Experts]:
    """Return a layer's tensors of experts by name."""
    sizes, names, hidden = _expert_sizes(text, layer), text.weights, text.hidden_size
    if sizes is None:
        return {}
    count, inner = sizes.num_experts, sizes.intermediate_size
    gate, up, down = (name.rpartition(".")[2] for name in (names.gate, names.up, names.down))
    return {
        names.experts_gate_up: _Experts((count, 2 * inner, hidden), (gate, up)),
        names.experts_down: _Experts((count, hidden, inner), (down,)),
    }


def _expert_sizes(text: TextModelSpec, layer: int) -> ExpertsSpec | None:
    return text.experts if text.experts and layer not in text.experts.dense_layers else None


def _quantize_int8(name: str, weight: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    _check_finite(name, weight)
    codes, scales = int8_codes(weight)
    return codes, scales.to(dtype)


def _quantize_int4(name: str, weight: Tensor, *, group: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    _check_finite(name, weight)
    quantized = quantize(weight, group)
    zeros = F.pad(quantized.zeros, (0, 0, 0, -len(weight) % CODES_PER_INT32))
    return _pack(quantized.codes), quantized.scales.to(dtype), _pack(zeros.T).T, torch.tensor(weight.shape)


def _pack(codes: Tensor) -> Tensor:
    """Pack codes of 4 bits, uint8 [rows, columns], into int32 [rows, columns / 8], the first one in the lowest bits."""
    pairs = codes[:, ::2] | codes[:, 1::2] << 4
    return pairs.clone(memory_format=torch.contiguous_format).view(torch.int32)


def _check_finite(name: str, weight: Tensor) -> None:
    if not bool(weight.isfinite().all()):
        raise CheckpointError(f"Tensor {name!r} has values that are not finite. Copy or download the checkpoint again.")


def _compute(file: Path, sources: Sequence[_Source], advance: Callable[[], None]) -> Iterator[Tensor]:
    """Yield the quantized checkpoint's tensors for one file of the original.

    The file is opened for one tensor at a time, since pages of a mapped file that were read count as memory.
    """
    for source in sources:
        try:
            with safe_open(file, framework="pt") as opened:
                yield from source.compute(opened.get_tensor(source.info.name))
        except SafetensorError as error:
            raise unreadable_file_error(file, error) from error
        advance()


def _find(infos: Mapping[str, TensorInfo], name: str) -> TensorInfo:
    if name not in infos:
        raise CheckpointError(f"The checkpoint has no tensor {name!r}. Copy or download its safetensors again.")
    return infos[name]


def _stored_info(file: Path, name: str) -> TensorInfo:
    try:
        with safe_open(file, framework="pt") as opened:
            stored = opened.get_slice(name)
            dtype, shape = stored.get_dtype(), tuple(stored.get_shape())
    except (OSError, SafetensorError) as error:
        raise unreadable_file_error(file, error) from error
    if dtype not in _STORED_DTYPES:
        raise CheckpointError(f"{file}: tensor {name!r} has the unknown type {dtype}. Copy or download it again.")
    return TensorInfo(name, _STORED_DTYPES[dtype], shape)


def _read_config(folder: Path) -> Mapping[str, Any]:
    config: Mapping[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    for fields in (config, config.get("text_config") or {}):
        if settings := fields.get("quantization_config") or fields.get("compression_config"):
            method = settings.get("quant_method", "compressed-tensors")
            raise CheckpointError(
                f"{folder} has quantized weights already ({method}). Quantize the original checkpoint."
            )
    return config


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _copy_other_files(source: Path, target: Path, rewritten: Container[str]) -> tuple[str, ...]:
    """Copy the files of a checkpoint that do not depend on its weights, without those in `rewritten`; return the names
    of the other ones."""
    omitted: list[str] = []
    for path in sorted(source.iterdir()):
        if path.name in rewritten:
            continue
        if path.is_dir() or path.suffix in WEIGHT_SUFFIXES:
            omitted.append(path.name)
        else:
            shutil.copyfile(path, target / path.name)
    return tuple(omitted)
