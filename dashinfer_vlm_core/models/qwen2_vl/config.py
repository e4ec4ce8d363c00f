"""A checkpoint's JSON files -> what the tower, the text model and the engine need to know of them.

Two layouts are read: the published one (text fields at the top of `config.json`, `rope_scaling`, `torch_dtype`) and the
one that transformers 5 writes (`text_config`, `rope_parameters`, `dtype`). What we do not compute exactly as trained is
refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ...errors import CheckpointError
from ...media.sampling import VideoSamplingPolicy
from ...tokenization.conversation import HERMES
from ..spec import ModelSpec, PixelSpec, Profile, RotarySpec, TextModelSpec, TokenSpec

MODEL_TYPE = "qwen2_vl"
DTYPES = ("float32", "bfloat16", "float16")
VISION_ACTIVATIONS = ("quick_gelu", "gelu")
VISION_ROPE_THETA = 10000.0

CONFIG = "config.json"
GENERATION = "generation_config.json"
PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"

TENSOR_RENAMES = ((r"^model\.visual\.", "visual."), (r"^model\.language_model\.", "model."))
"""From the names that newer versions of transformers write to the published ones."""

_STORED_PLAINLY = f"Take the checkpoint whose weights are {', '.join(DTYPES[:-1])} or {DTYPES[-1]}."


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """Shapes and constants of the vision tower.

    Attributes:
        embed_dim: width inside the tower; `num_heads` times a multiple of 4.
        hidden_size: width of a visual token, which is the text model's.
        mlp_ratio: width of the MLP, in units of `embed_dim`.
        hidden_act: one of `VISION_ACTIVATIONS`.
    """

    depth: int
    embed_dim: int
    hidden_size: int
    num_heads: int
    mlp_ratio: float
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    in_channels: int
    hidden_act: str


def read_text_model(folder: Path) -> TextModelSpec:
    """The text model of the checkpoint in `folder`.

    Raises:
        CheckpointError: `config.json` is missing or wrong, or asks for something that we do not compute.
    """
    config = _read_config(folder)
    text = _text_fields(config)
    _refuse_other_text_models(text)
    heads = text.integer("num_attention_heads")
    hidden_size = text.integer("hidden_size")
    read = TextModelSpec(
        hidden_size=hidden_size,
        intermediate_size=text.integer("intermediate_size"),
        num_hidden_layers=text.integer("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=text.integer("num_key_value_heads", default=heads),
        head_dim=text.integer("head_dim", default=hidden_size // heads),
        vocab_size=text.integer("vocab_size"),
        max_position_embeddings=text.integer("max_position_embeddings"),
        norm_eps=text.number("rms_norm_eps"),
        rotary=RotarySpec(theta=_rope_theta(text), axes=_axes(_mrope_section(text))),
        tie_word_embeddings=config.flag("tie_word_embeddings") or text.flag("tie_word_embeddings"),
    )
    _check_heads(text, read)
    return read


def read_vision_config(folder: Path) -> VisionConfig:
    """The vision tower of the checkpoint in `folder`.

    Raises:
        CheckpointError: `config.json` is missing or wrong, or asks for something that we do not compute.
    """
    vision = _read_config(folder).section("vision_config")
    _refuse_other_towers(vision)
    read = VisionConfig(
        depth=vision.integer("depth"),
        embed_dim=vision.integer("embed_dim"),
        hidden_size=vision.integer("hidden_size"),
        num_heads=vision.integer("num_heads"),
        mlp_ratio=vision.number("mlp_ratio"),
        patch_size=vision.integer("patch_size"),
        temporal_patch_size=vision.integer("temporal_patch_size", default=2),
        spatial_merge_size=vision.integer("spatial_merge_size"),
        in_channels=vision.integer("in_channels", default=3),
        hidden_act=str(vision.get("hidden_act") or "quick_gelu"),
    )
    if read.embed_dim % (4 * read.num_heads):
        vision.fail(
            "num_heads", f"does not divide `embed_dim` {read.embed_dim} into heads whose width is a multiple of 4"
        )
    return read


def read_spec(folder: Path) -> ModelSpec:
    """What every package needs to know of the checkpoint in `folder`.

    Raises:
        CheckpointError: a file is missing or wrong, files contradict each other, or ask for what we do not support.
    """
    config = _read_config(folder)
    text, vision = read_text_model(folder), read_vision_config(folder)
    if vision.hidden_size != text.hidden_size:
        config.fail("vision_config.hidden_size", f"is {vision.hidden_size}, but the text is {text.hidden_size} wide")
    return ModelSpec(
        folder=folder,
        model_type=MODEL_TYPE,
        max_model_len=text.max_position_embeddings,
        dtype=_dtype(config),
        pixels=_pixel_spec(folder, vision),
        tokens=TokenSpec(
            image=config.integer("image_token_id"),
            video=config.integer("video_token_id"),
            stop=_stop_tokens(folder, config),
        ),
        text=text,
        video=VideoSamplingPolicy(),
        conversation=HERMES,
        profile=Profile(),
        tensor_renames=TENSOR_RENAMES,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fields:
    """An object of a JSON file, whose faults are reported by file and field."""

    file: Path
    values: Mapping[str, Any]
    prefix: str = ""

    def fail(self, name: str, fault: str, step: str = "Take the file from the published checkpoint again.") -> NoReturn:
        raise CheckpointError(f"{self.file}: `{self.prefix}{name}` {fault}. {step}")

    def get(self, name: str) -> Any:
        """The value, or None where it is absent or null."""
        return self.values.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        value = default if self.get(name) is None else self.get(name)
        if type(value) is not int or value < (0 if name.endswith("_token_id") else 1):
            self.fail(name, "is missing" if value is None else f"must be a whole number above zero, not {value!r}")
        return value

    def number(self, name: str) -> float:
        value = self.get(name)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            self.fail(name, "is missing" if value is None else f"must be a number above zero, not {value!r}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if value not in (None, True, False):
            self.fail(name, f"must be true or false, not {value!r}")
        return bool(value)

    def triple(self, name: str) -> tuple[Any, Any, Any]:
        value = self.get(name)
        numbers = isinstance(value, list) and all(type(item) in (int, float) and item > 0 for item in value)
        if not numbers or len(value) != 3:
            self.fail(name, "is missing" if value is None else f"must be three numbers above zero, not {value!r}")
        return value[0], value[1], value[2]

    def section(self, name: str) -> _Fields:
        value = self.get(name)
        if not isinstance(value, dict):
            self.fail(name, "is missing" if value is None else f"must be an object, not {value!r}")
        return _Fields(file=self.file, values=value, prefix=f"{self.prefix}{name}.")


def _read_fields(file: Path) -> _Fields:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing. Point `model` at a folder that holds a whole checkpoint.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Copy or download it again.") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds no JSON object. Copy or download it again.")
    return _Fields(file=file, values=values)


def _read_config(folder: Path) -> _Fields:
    """`config.json`, if it is of this architecture and its weights are stored plainly."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder. Point `model` at the folder of a checkpoint.")
    config = _read_fields(folder / CONFIG)
    if config.get("model_type") != MODEL_TYPE:
        config.fail("model_type", f"is {config.get('model_type')!r}", f"Only {MODEL_TYPE!r} checkpoints are read here.")
    if config.get("quantization_config") is not None:
        method = config.section("quantization_config").get("quant_method")
        config.fail("quantization_config", f"says that the weights are quantised ({method})", _STORED_PLAINLY)
    return config


def _text_fields(config: _Fields) -> _Fields:
    return config if config.get("text_config") is None else config.section("text_config")


def _refuse_other_text_models(text: _Fields) -> None:
    if text.get("hidden_act") not in (None, "silu"):
        text.fail("hidden_act", f"is {text.get('hidden_act')!r}", "Only 'silu' is supported.")
    if text.flag("use_sliding_window") or "sliding_attention" in (text.get("layer_types") or ()):
        text.fail("use_sliding_window", "asks for sliding-window attention", "Only full attention is supported.")


def _refuse_other_towers(vision: _Fields) -> None:
    if vision.get("hidden_act") not in (None, *VISION_ACTIVATIONS):
        vision.fail("hidden_act", f"is {vision.get('hidden_act')!r}", f"Supported are {', '.join(VISION_ACTIVATIONS)}.")
    if any(vision.get(name) not in (None, 3) for name in ("in_channels", "in_chans")):
        vision.fail("in_channels", "is not 3", "Only towers that read RGB are supported.")
    for name, trained in (("rope_type", "axial"), ("rope_theta", VISION_ROPE_THETA)):
        found = (vision.get("rope_parameters") or {}).get(name)
        if found not in (None, trained):
            vision.fail(f"rope_parameters.{name}", f"is {found!r}", f"Only {trained!r} is supported.")


def _rope(text: _Fields) -> _Fields:
    """The rotary options of the text model, whichever of the two names they go by; only plain M-RoPE is computed."""
    rope = text.section("rope_parameters" if text.get("rope_parameters") is not None else "rope_scaling")
    for name in ("type", "rope_type"):
        if rope.get(name) not in (None, "mrope", "default"):
            rope.fail(name, f"is {rope.get(name)!r}", "Only plain M-RoPE ('mrope' or 'default') is supported.")
    return rope


def _rope_theta(text: _Fields) -> float:
    rope = _rope(text)
    return (rope if rope.get("rope_theta") is not None else text).number("rope_theta")


def _mrope_section(text: _Fields) -> tuple[int, int, int]:
    time, height, width = _rope(text).triple("mrope_section")
    return int(time), int(height), int(width)


def _axes(section: tuple[int, int, int]) -> tuple[int, ...]:
    """The axis of each frequency: those of time stand first, then those of height, then those of width."""
    return tuple(axis for axis, count in enumerate(section) for _ in range(count))


def _check_heads(text: _Fields, read: TextModelSpec) -> None:
    if read.num_attention_heads * read.head_dim != read.hidden_size:
        text.fail("num_attention_heads", f"times `head_dim` {read.head_dim} is not `hidden_size` {read.hidden_size}")
    if read.num_attention_heads % read.num_key_value_heads:
        text.fail("num_key_value_heads", f"does not divide `num_attention_heads` {read.num_attention_heads}")
    if 2 * len(read.rotary.axes) != read.head_dim:
        _rope(text).fail("mrope_section", f"does not add up to half of `head_dim` {read.head_dim}")


def _dtype(config: _Fields) -> str:
    """The stored number type; the old name and the new one, at the top or in `text_config`."""
    found = [place.get(name) for place in (config, _text_fields(config)) for name in ("dtype", "torch_dtype")]
    dtype = next((name for name in found if name is not None), None)
    if dtype not in DTYPES:
        config.fail("dtype", "is missing" if dtype is None else f"is {dtype!r}", _STORED_PLAINLY)
    return str(dtype)


def _stop_tokens(folder: Path, config: _Fields) -> tuple[int, ...]:
    """The end tokens that `generation_config.json` names, else those of `config.json`."""
    generation = folder / GENERATION
    places = ([_read_fields(generation)] if generation.exists() else []) + [config, _text_fields(config)]
    place = next((place for place in places if place.get("eos_token_id") is not None), config)
    found = place.get("eos_token_id")
    tokens = found if isinstance(found, list) else [found]
    if not tokens or not all(type(token) is int and token >= 0 for token in tokens):
        place.fail("eos_token_id", "is missing" if found is None else f"must be token ids, not {found!r}")
    return tuple(tokens)


def _pixel_spec(folder: Path, vision: VisionConfig) -> PixelSpec:
    fields = _preprocessor(folder)
    for name, trained in (
        ("patch_size", vision.patch_size),
        ("temporal_patch_size", vision.temporal_patch_size),
        ("merge_size", vision.spatial_merge_size),
    ):
        if fields.get(name) not in (None, trained):
            fields.fail(name, f"is {fields.get(name)!r}, but {CONFIG} says {trained}")
    return PixelSpec(
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.spatial_merge_size,
        min_pixels=_pixel_limit(fields, "min_pixels", "shortest_edge"),
        max_pixels=_pixel_limit(fields, "max_pixels", "longest_edge"),
        mean=fields.triple("image_mean"),
        std=fields.triple("image_std"),
    )


def _preprocessor(folder: Path) -> _Fields:
    """`preprocessor_config.json`, or the part of `processor_config.json` into which transformers 5 writes it."""
    if not (folder / PREPROCESSOR).exists() and (folder / PROCESSOR).exists():
        return _read_fields(folder / PROCESSOR).section("image_processor")
    return _read_fields(folder / PREPROCESSOR)


def _pixel_limit(fields: _Fields, name: str, edge: str) -> int:
    """A limit in pixels; newer files call it an edge of `size`, though it counts pixels there too."""
    return fields.integer(name) if fields.get(name) is not None else fields.section("size").integer(edge)
