"""LoRA adapters in PEFT's folder format (arXiv:2106.09685). This module does not import torch.

A folder has `adapter_config.json` and `adapter_model.safetensors`. Its tensors are named `base_model.model.`, the path
of a module in transformers' model, and `.lora_A.weight` or `.lora_B.weight`; modules that were trained completely
(`modules_to_save`) have `.weight` and `.bias`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..config.folders import expand_user
from ..errors import CheckpointError
from ..text_spec import AttentionSpec, DeltaNetSpec, ExpertsSpec, MlpSpec, TextModelSpec
from .checkpoint import ADAPTER, HUB_ID, download
from .files import rename, stored_headers, stored_tensors, tensor_names
from .headers import TensorHeader
from .lora_config import LoraConfig, read_lora_config
from .pooling import Projection
from .spec import ModelSpec

TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."
FLOATS = ("F32", "F16", "BF16")


class LoraFactors(NamedTuple):
    """What an adapter adds to the weights of one module: `scale` times the product of B [outputs, rank] and A [rank,
    inputs].

    Attributes:
        a: name of the tensor A in the file.
        b: name of the tensor B in the file.
        rank: the rank.
        scale: factor of the product.
    """

    a: str
    b: str
    rank: int
    scale: float


@dataclass(frozen=True, kw_only=True, eq=False)
class LoraWeights:
    """An adapter whose tensors have been checked for a model; they are read from its file when they are needed.

    Two adapters are equal only if they are the same object, which decoders use as a key.

    Attributes:
        name: its name in requests.
        source: the name of its folder, or its Hugging Face ID; contains no path.
        file: the file with its tensors.
        digest: 32 bytes; equal for equal content. Part of the keys of caches.
        text: the factors by the module's name in `ModelSpec.text.weights`, with the layer's index in it, and those of
            the projection of `PoolingSpec.head`.
        vision: the factors of other modules, by their name after `ModelSpec.tensor_renames`.
        saved: names in the file of tensors that replace those of the checkpoint, by the checkpoint's name after
            `ModelSpec.tensor_renames`.
        num_bytes: size of its tensors in the file.
        saved_text: the members of `saved` that are of the text model: the embedding table and the output layer.
    """

    name: str
    source: str
    file: Path
    digest: bytes
    text: Mapping[str, LoraFactors]
    vision: Mapping[str, LoraFactors]
    saved: Mapping[str, str]
    num_bytes: int

    saved_text: frozenset[str] = frozenset()

    @property
    def saved_vision(self) -> Mapping[str, str]:
        """The members of `saved` that are not of the text model."""
        return {name: stored for name, stored in self.saved.items() if name not in self.saved_text}

    @property
    def changes_vision(self) -> bool:
        """Whether it changes the vision encoder, so that images have other embeddings."""
        return bool(self.vision or self.saved_vision)


def find_lora(path: str) -> Path:
    """Return the folder of an adapter; a Hugging Face ID that is not in the cache is downloaded.

    Raises:
        CheckpointError: there is no such folder or repository, or the download failed.
    """
    folder = expand_user(path)
    if path and folder.is_dir():
        return folder
    if HUB_ID.fullmatch(path):
        return download(path)
    raise CheckpointError(
        f"There is no LoRA adapter {path!r}. Use a folder with {ADAPTER}, or a Hugging Face ID such as owner/name.",
        param="lora",
    )


def adapter_source(path: str) -> str:
    """Return what an adapter is called in messages: the name of its folder without the path, or its Hugging Face ID."""
    folder = expand_user(path)
    return folder.resolve().name if folder.is_dir() else path


def read_lora(name: str, path: str, spec: ModelSpec) -> LoraWeights:
    """Read an adapter's configuration and check its tensors against the model's; their values are not read.

    Args:
        name: its name in requests.
        path: its folder, or its Hugging Face ID.
        spec: the model that it was trained for.

    Raises:
        CheckpointError: a file is missing or damaged, or the adapter requires an unsupported feature or another model;
            the message names the file and the field or tensor.
    """
    folder = find_lora(path)
    config = read_lora_config(folder / ADAPTER)
    file = _tensor_file(folder)
    reader = _FolderReader(file, _headers(file), config, spec)
    text, vision = reader.factors()
    saved = reader.saved()
    return LoraWeights(
        name=name,
        source=adapter_source(path),
        file=file,
        digest=_digest(folder / ADAPTER, file),
        text=text,
        vision=vision,
        saved=saved,
        saved_text=frozenset(saved).intersection(text_tensors(spec.text)),
        num_bytes=reader.num_bytes,
    )


def _tensor_file(folder: Path) -> Path:
    if (folder / TENSORS).is_file():
        return folder / TENSORS
    if (folder / "adapter_model.bin").exists():
        raise CheckpointError(
            f"{folder} contains only pickled weights, which can execute code when they are loaded. If you trust them,"
            " load the adapter once with PEFT, and save it with `save_pretrained`."
        )
    raise CheckpointError(f"{folder} contains no {TENSORS}. Copy or download the adapter again.")


class _FolderReader:
    """Assigns the tensors of a file to the modules of a model, and checks their shapes."""

    def __init__(self, file: Path, headers: Mapping[str, TensorHeader], config: LoraConfig, spec: ModelSpec) -> None:
        self._file = file
        self._shapes = {name: header.shape for name, header in headers.items()}
        self.num_bytes: int = sum(header.nbytes for header in headers.values())
        self._config = config
        self._renames = spec.tensor_renames
        self._text = text_tensors(spec.text) | _projection_tensors(spec)
        names = spec.text.weights
        layer = re.escape(names.layer).replace(r"\{\}", r"\d+")
        self._text_only = re.compile(rf"({layer}|{re.escape(names.norm)}|{re.escape(names.mtp)})\.")
        self._checkpoint = stored_tensors(spec.folder, spec.tensor_renames)
        self._saved: dict[str, str] = {}
        self._factors: dict[str, dict[str, str]] = {}
        for name in self._shapes:
            self._assign(name)

    def factors(self) -> tuple[dict[str, LoraFactors], dict[str, LoraFactors]]:
        """Return the factors of the text model's modules, and of others."""
        found = {module: self._check_factors(module, tensors) for module, tensors in self._factors.items()}
        text = {module: factors for module, factors in found.items() if f"{module}.weight" in self._text}
        return text, {module: factors for module, factors in found.items() if module not in text}

    def saved(self) -> dict[str, str]:
        """Return the tensors that replace those of the checkpoint."""
        for name, stored in self._saved.items():
            self._check_shape(stored, self._expected_shape(name, stored))
        for module in self._config.saved_modules:
            if not any(re.search(rf"(^|\.){re.escape(module)}\.", stored) for stored in self._saved.values()):
                raise CheckpointError(
                    f"{self._file} has no tensor of {module!r}, which `modules_to_save` lists. Copy the adapter again."
                )
        if not self._saved and not self._factors:
            raise CheckpointError(f"{self._file} has no tensors. Copy or download the adapter again.")
        return self._saved

    def _assign(self, stored: str) -> None:
        if not stored.startswith(PREFIX):
            raise self._unknown(stored)
        # PEFT names the weights of a layer that also has factors so.
        path = stored.removeprefix(PREFIX).replace(".base_layer.", ".")
        module, factor, _ = path.partition(".lora_")
        if not factor:
            self._saved[rename(path, self._renames)] = stored
            return
        kind = path[len(module) + 1 :]
        if kind not in _KINDS:
            raise self._unknown(stored)
        module = rename(f"{module}.weight", self._renames).removesuffix(".weight")
        self._factors.setdefault(module, {})[_KINDS[kind]] = stored

    def _check_factors(self, module: str, tensors: Mapping[str, str]) -> LoraFactors:
        given = next(iter(tensors.values()))
        outputs, *inputs = self._expected_shape(f"{module}.weight", given)
        for kind in ("A", "B"):
            if kind not in tensors:
                raise CheckpointError(
                    f"{self._file}: {given!r} has no counterpart lora_{kind}. Copy or download the adapter again."
                )
        a = tensors["A"]
        b = tensors["B"]
        path = a.removeprefix(PREFIX).partition(".lora_")[0]
        if len(inputs) != 1:
            raise CheckpointError(
                f"{self._file}: {a!r} changes a convolution or a fused tensor, which is not supported. Merge"
                " the adapter."
            )
        rank = self._config.rank_of(path)
        if f"{module}.weight" == next(iter(self._text)):  # PEFT stores the factors of an embedding table transposed
            outputs, inputs = inputs[0], [outputs]
        self._check_shape(a, (rank, *inputs))
        self._check_shape(b, (outputs, rank))
        return LoraFactors(a, b, rank, self._config.scale_of(path, rank))

    def _expected_shape(self, name: str, stored: str) -> Sequence[int]:
        if name in self._text:
            return self._text[name]
        if self._text_only.match(name) or name not in self._checkpoint:
            raise self._unknown(stored)
        return stored_headers({name: self._checkpoint[name]})[name].shape

    def _check_shape(self, stored: str, expected: Sequence[int]) -> None:
        shape = self._shapes[stored]
        if shape != tuple(expected):
            raise CheckpointError(
                f"{self._file}: tensor {stored!r} is {list(shape)}, but {list(expected)} is required by {ADAPTER} and"
                " the model. Use the model that the adapter was trained with."
            )

    def _unknown(self, stored: str) -> CheckpointError:
        return CheckpointError(
            f"{self._file}: tensor {stored!r} belongs to no module of this model that an adapter can change. Use the"
            " model that the adapter was trained with, or merge the adapter."
        )


_KINDS = {
    "lora_A.weight": "A",
    "lora_B.weight": "B",
    "lora_embedding_A": "A",
    "lora_embedding_B": "B",
}


def text_tensors(text: TextModelSpec) -> dict[str, tuple[int, int]]:
    """Return the shapes of the text model's tensors that adapters can change: first the embedding table, then the
    output layer, then the linear layers."""
    names, table = text.weights, (text.vocab_size, text.hidden_size)
    shapes = {f"{names.embedding}.weight": table, f"{names.head}.weight": table}
    for number, layer in enumerate(text.layers):
        for name, shape in (_mixer_tensors(text, layer.mixer) | _mlp_tensors(text, layer.mlp)).items():
            shapes[f"{names.layer.format(number)}.{name}.weight"] = shape
    return shapes


def _projection_tensors(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    head = spec.pooling.head if spec.pooling else None
    return {f"{head.name}.weight": (head.size, spec.hidden_size)} if isinstance(head, Projection) else {}


def _mixer_tensors(text: TextModelSpec, mixer: AttentionSpec | DeltaNetSpec) -> dict[str, tuple[int, int]]:
    names = text.weights
    if isinstance(mixer, AttentionSpec):
        outputs = dict(zip((names.query, names.key, names.value), mixer.outputs, strict=True))
        output, width = names.output, mixer.width
    else:
        outputs = {names.delta_qkv: mixer.conv_channels, names.delta_z: mixer.value_width}
        outputs |= dict.fromkeys((names.delta_beta, names.delta_step), mixer.num_value_heads)
        output, width = names.delta_output, mixer.value_width
    return {name: (count, text.hidden_size) for name, count in outputs.items()} | {output: (text.hidden_size, width)}


def _mlp_tensors(text: TextModelSpec, mlp: MlpSpec | ExpertsSpec) -> dict[str, tuple[int, int]]:
    names, hidden = text.weights, text.hidden_size
    if isinstance(mlp, MlpSpec):
        gate, up, down = names.mlp
        inner, router = mlp.intermediate_size, {}
    else:
        gate, up, down = names.shared_expert
        inner, router = mlp.shared_intermediate_size, {names.shared_router: (1, hidden)}
    return {gate: (inner, hidden), up: (inner, hidden), down: (hidden, inner), **router} if inner else {}


def _headers(file: Path) -> dict[str, TensorHeader]:
    headers = stored_headers({name: (file, name) for name in tensor_names(file)})
    for name, (_, dtype) in headers.items():
        if dtype not in FLOATS:
            raise CheckpointError(f"{file}: tensor {name!r} has the data type {dtype}. Use one of {', '.join(FLOATS)}.")
    return headers


def _digest(*files: Path) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    for file in files:
        digest.update(hashlib.blake2b(file.read_bytes()).digest())
    return digest.digest()


class VisionMerge:
    """Merges an adapter into the vision encoder's tensors while a family reads them.

    Attributes:
        lora: the adapter.
        unused: names of the tensors that it changes and that were not read yet.
    """

    def __init__(self, lora: LoraWeights) -> None:
        self.lora = lora
        self._changed = {f"{module}.weight" for module in lora.vision} | set(lora.saved_vision)
        self.unused: set[str] = set(self._changed)

    def changes(self, name: str) -> bool:
        """Return whether the adapter changes a tensor of the checkpoint."""
        return name in self._changed

    def check_complete(self) -> None:
        """Check that the family has read all tensors that the adapter changes.

        Raises:
            CheckpointError: it has not.
        """
        if self.unused:
            raise CheckpointError(
                f"{self.lora.file}: the vision encoder does not use {min(self.unused)!r}, which the adapter changes."
                " Merge the adapter into a checkpoint with PEFT's `merge_and_unload`, and serve that."
            )
