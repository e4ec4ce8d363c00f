"""Convert a checkpoint's language model to DashInfer's format, once, in DashInfer's environment and the user's
cache."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dashinfer_vlm_core.config.folders import access_problem, cache_problem
from dashinfer_vlm_core.errors import CheckpointError, SetupError
from dashinfer_vlm_core.models.files import stored_tensors
from dashinfer_vlm_core.models.spec import ModelSpec
from dashinfer_vlm_core.progress import Progress
from dashinfer_vlm_core.text_spec import MlpSpec, TextModelSpec, TextWeightNames

from .environment import VERSION, Environment, check_space, inherited_variables, locked, sha256

logger: logging.Logger = logging.getLogger(__name__)

PROGRAM = Path(__file__).with_name("serialize.py")
NAME = "model"
MANIFEST = "manifest.json"
FORMAT = 1
"""Incremented when the output of `serialize.py` changes, so that older cache entries are not used."""

ENGINE_CLASS = "Qwen_v20"
"""DashInfer's class for the text models of Qwen2 and Qwen2-VL."""

TEXT_PREFIXES = ("model.", "lm_head.")
"""Prefixes of the tensor names of a text model."""

HEAD_DIMS = (64, 128)
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LOG_LINES = 20

Tensors = Mapping[str, tuple[Path, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """The format in which weights are written.

    Attributes:
        dtype: `float32`, `bfloat16` or `float16`.
        quantization: `none`, `int8` or `uint4`.
        split: whether several devices share them.
    """

    dtype: str
    quantization: str = "none"
    split: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertedModel:
    """The two files of a converted model."""

    graph: Path
    weights: Path

    @classmethod
    def at(cls, folder: Path) -> ConvertedModel:
        return cls(graph=folder / f"{NAME}.asgraph", weights=folder / f"{NAME}.asparam")


def convert(spec: ModelSpec, weight_format: WeightFormat, *, environment: Environment, cache: Path) -> ConvertedModel:
    """Convert the checkpoint's language model to DashInfer's format, or return it from the cache.

    The key consists of the identity of the weights (names, sizes and times of their files), the configuration, the
    weight format and DashInfer's version. Entries are written atomically. Their checksums are verified each time,
    which takes a fraction of the loading that follows. An entry to which other users can write is not used.

    Raises:
        CheckpointError: tensors are missing or files are damaged.
        SetupError: there is too little disk space, or DashInfer failed; the message contains its output.
    """
    text = spec.text
    stored = stored_tensors(spec.folder, spec.tensor_renames)
    tensors = {name: location for name, location in stored.items() if name.startswith(TEXT_PREFIXES)}
    _check_tensors(tensors, text, spec)
    folder = cache / _key(tensors, text, weight_format)
    if _is_usable(folder):  # also in a cache that is read-only
        return ConvertedModel.at(folder)
    with locked(folder.with_suffix(".lock")):
        if _is_usable(folder):  # another process converted it
            return ConvertedModel.at(folder)
        if folder.exists():
            logger.warning(
                "The converted model in %s is not used: %s. It is converted again.",
                folder,
                access_problem(folder.stat()) or "it is damaged",
            )
        needed = _size(tensors, spec, weight_format)
        try:
            _rebuild(folder, _job(tensors, text, weight_format), environment=environment, needed=needed)
        except OSError as error:
            raise SetupError(cache_problem(cache, error.strerror or str(error))) from error
    return ConvertedModel.at(folder)


def unsupported(text: TextModelSpec) -> str:
    """Why DashInfer has no class for a text model; empty if it has one."""
    attention = text.attention
    rotary = attention.rotary
    requirements = {
        "RMSNorm": text.norm == "rms_norm",
        "biases for queries, keys and values": attention.bias,
        "no norms for queries and keys": not attention.head_norms,
        "rotary positions in halves, time before height before width": rotary.pairs == "halves"
        and rotary.sections is not None,
        "no additions after its first layers": not text.visual_levels,
        "no gated delta nets": text.delta_net is None,
        "no mixture of experts": all(isinstance(layer.mlp, MlpSpec) for layer in text.layers),
        "a head size of 64 or 128": attention.head_dim in HEAD_DIMS,
        "Qwen2-VL's tensor names": text.weights == TextWeightNames(),
    }
    missing = [requirement for requirement, met in requirements.items() if not met]
    return f"its class {ENGINE_CLASS} requires {', '.join(missing)}" if missing else ""


def _check_tensors(tensors: Tensors, text: TextModelSpec, spec: ModelSpec) -> None:
    # DashInfer reports other missing tensors itself.
    last = f"model.layers.{len(text.layers) - 1}."
    wanted = {"model.embed_tokens.weight", "model.norm.weight"} | (
        set() if text.tie_word_embeddings else {"lm_head.weight"}
    )
    missing = sorted(wanted - set(tensors)) or ([] if any(name.startswith(last) for name in tensors) else [f"{last}*"])
    if missing:
        raise CheckpointError(
            f"{spec.folder} has no tensor {missing[0]!r}. Copy or download its safetensors files again."
        )


def _key(tensors: Tensors, text: TextModelSpec, weight_format: WeightFormat) -> str:
    files = sorted({file for file, _ in tensors.values()})
    stats = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    identity = json.dumps([FORMAT, VERSION, asdict(weight_format), asdict(text), stats], sort_keys=True)
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def _job(tensors: Tensors, text: TextModelSpec, weight_format: WeightFormat) -> dict[str, Any]:
    attention = text.attention
    rotary = attention.rotary
    config = {
        "hidden_size": text.hidden_size,
        "intermediate_size": text.layers[0].mlp.intermediate_size,
        "num_hidden_layers": len(text.layers),
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "vocab_size": text.vocab_size,
        "max_position_embeddings": text.max_position_embeddings,
        "rms_norm_eps": text.norm_eps,
        "rope_theta": rotary.theta,
        "model_type": ENGINE_CLASS,
        "hidden_act": "silu",
        "rotary_emb_base": rotary.theta,
        "size_per_head": attention.head_dim,
        "rope_scaling": {"type": "mrope", "mrope_section": list(rotary.sections or ())},
    }
    return {
        "name": NAME,
        **asdict(weight_format),
        "tensors": {name: [str(file), stored] for name, (file, stored) in tensors.items()},
        "tied": text.tie_word_embeddings,
        "config": config,
    }


def _size(tensors: Tensors, spec: ModelSpec, weight_format: WeightFormat) -> int:
    """An upper bound of the output's size in bytes, which includes the vision encoder's weights in the same files."""
    stored = sum(file.stat().st_size for file in {file for file, _ in tensors.values()})
    return 2 * stored * DTYPE_BYTES[weight_format.dtype] // DTYPE_BYTES[spec.dtype]


def _rebuild(folder: Path, job: dict[str, Any], *, environment: Environment, needed: int) -> None:
    partial = folder.with_suffix(".partial")
    for leftover in (folder, partial):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True, mode=0o755)
    try:
        check_space(partial, needed, "Converting the model")
        logger.info(
            "Converting the language model to DashInfer's format, once: up to %.1f GB in %s.", needed / 1e9, folder
        )
        with Progress(desc="Converting the language model to DashInfer's format"):
            _run_serializer({**job, "folder": str(partial)}, partial, environment)
        (partial / MANIFEST).write_text(json.dumps(_checksums(partial)), encoding="utf-8")
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _run_serializer(job: dict[str, Any], folder: Path, environment: Environment) -> None:
    path = folder / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    done = subprocess.run(  # noqa: S603 - the operator selects the interpreter; the program is our own
        environment.command(PROGRAM, str(path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=inherited_variables(),
        check=False,
    )
    path.unlink()
    logger.debug("Converting: %s", done.stdout)
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-LOG_LINES:])
        raise SetupError(f"DashInfer could not convert the model (exit status {done.returncode}): {last}")


def _is_usable(folder: Path) -> bool:
    try:
        if access_problem(folder.stat()):
            return False
        expected = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return bool(expected == _checksums(folder))
    except (OSError, ValueError):
        return False


def _checksums(folder: Path) -> dict[str, str]:
    files = ConvertedModel.at(folder)
    return {file.name: sha256(file) for file in (files.graph, files.weights)}
