"""Parse a checkpoint's JSON files for the vision encoder, the text model and the engine.

Two layouts are supported: the published one (text fields at the top level of `config.json`, `rope_scaling`,
`torch_dtype`) and that of transformers 5 (`text_config`, `rope_parameters`, `dtype`). Fields that are absent have
transformers' defaults where one of its versions leaves out fields with these values, as 4.45 to 4.49 do in
`vision_config`. Checkpoints that cannot be computed exactly as trained are rejected, and the error names the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError
from ...media.frame_sampling import VideoSamplingPolicy
from ...text_spec import AttentionSpec, LayerSpec, MlpSpec, RotarySpec, TextModelSpec
from ...tokenization.conversation import HERMES
from ..coordinates import CoordinateSpec
from ..json_fields import CONFIG, JsonFields, read_fields
from ..retrieval import extended_fields
from ..spec import ROTATION, ModelSpec, PixelSpec, Profile, TokenSpec
from ..stop_tokens import read_stop_tokens

MODEL_TYPE = "qwen2_vl"
DTYPES = ("float32", "bfloat16", "float16")
VISION_ACTIVATIONS = ("quick_gelu", "gelu")
OUTPUT_SIZE = "hidden_size"
"""The field of `vision_config` with the size of a visual token; in later families, it is the encoder's hidden size."""

TOKENS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
VISION_DEFAULTS = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "mlp_ratio": 4,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
}
"""transformers' default values."""

VISION_ROPE_THETA = 10000.0

PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"

TENSOR_RENAMES = (
    (r"^vlm\.", ""),
    (r"^model\.visual\.", "visual."),
    (r"^(model\.)?language_model\.(?!lm_head\.)", "model."),
)
"""Map the tensor names of newer versions of transformers, and of retrieval models, to the published ones."""

_DTYPE_STEP = f"Set it to the data type of the unquantized weights: {', '.join(DTYPES[:-1])} or {DTYPES[-1]}."


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """Shapes and constants of the vision encoder, in the names of the later families.

    Attributes:
        hidden_size: hidden size of the vision encoder; `num_heads` times a multiple of 4.
        intermediate_size: inner size of an MLP.
        output_size: size of a visual token, equal to the text model's hidden size.
        hidden_act: one of `vision_weights.ACTIVATIONS`.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    output_size: int
    num_heads: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    hidden_act: str

    @property
    def merge_width(self) -> int:
        """Number of values of a merge unit."""
        return self.hidden_size * self.spatial_merge_size**2

    @property
    def num_weights(self) -> int:
        """Number of weights, without biases and norms."""
        return self.count_weights()

    def count_weights(self, *, mlp_matrices: int = 2, mergers: int = 1) -> int:
        """Return the number of weights of an encoder with so many matrices per MLP, and so many mergers."""
        patch = 3 * self.temporal_patch_size * self.patch_size**2
        block = self.hidden_size * (4 * self.hidden_size + mlp_matrices * self.intermediate_size)
        merger = self.merge_width * (self.merge_width + self.output_size)
        return self.hidden_size * patch + self.depth * block + mergers * merger


def text_model_spec(config: JsonFields) -> TextModelSpec:
    """Return the text model that `config.json` describes: Qwen2, in either layout.

    Raises:
        CheckpointError: a field is missing or invalid, or requires an unsupported feature.
    """
    text = text_fields(config)
    axes = tuple(axis for axis, count in enumerate(mrope_section(text)) for _ in range(count))
    heads, hidden_size = text.integer("num_attention_heads"), text.integer("hidden_size")
    head_dim = text.integer("head_dim", default=hidden_size // heads)
    if heads * head_dim != hidden_size:
        text.fail("num_attention_heads", f"times `head_dim` {head_dim} is not `hidden_size` {hidden_size}")
    attention = attention_spec(text, axes, head_dim=head_dim, bias=True)
    mlp = MlpSpec(intermediate_size=text.integer("intermediate_size"))
    return shared_text_model(config, [LayerSpec(mixer=attention, mlp=mlp)] * text.integer("num_hidden_layers"))


def shared_text_model(config: JsonFields, layers: Sequence[LayerSpec]) -> TextModelSpec:
    """Return a text model from the fields of `config.json`, in either layout, that families share.

    Raises:
        CheckpointError: a field is missing or invalid, or requires an unsupported feature.
    """
    text = text_fields(config)
    _check_text_model(text)
    return TextModelSpec(
        hidden_size=text.integer("hidden_size"),
        layers=tuple(layers),
        vocab_size=text.integer("vocab_size"),
        max_position_embeddings=text.integer("max_position_embeddings"),
        norm_eps=text.number("rms_norm_eps"),
        tie_word_embeddings=config.flag("tie_word_embeddings") or text.flag("tie_word_embeddings"),
    )


def attention_spec(
    text: JsonFields,
    axes: tuple[int, ...],
    *,
    head_dim: int,
    rotated: float = 1.0,
    bias: bool = False,
    head_norms: bool = False,
    gate: bool = False,
) -> AttentionSpec:
    """Return the attention of a text model's layers.

    Args:
        text: the text model's fields.
        axes: see `RotarySpec`.
        head_dim: the size of a head if it is absent.
        rotated: the part of a head's columns that is rotated.
        bias: as in `AttentionSpec`, like the others.
        head_norms: whether there are norms of heads.
        gate: whether there is a gate.

    Raises:
        CheckpointError: a field is missing or invalid, the heads do not share keys evenly, or the rotary frequencies
            do not fill these columns.
    """
    heads = text.integer("num_attention_heads")
    spec = AttentionSpec(
        num_heads=heads,
        num_kv_heads=text.integer("num_key_value_heads", default=heads),
        head_dim=text.integer("head_dim", default=head_dim),
        rotary=RotarySpec(theta=_rope_theta(text), axes=axes),
        bias=bias,
        head_norms=head_norms,
        gate=gate,
    )
    if heads % spec.num_kv_heads:
        text.fail("num_key_value_heads", f"does not divide `num_attention_heads` {heads}")
    if spec.rotary.columns != int(spec.head_dim * rotated):
        part = "half" if rotated == 1 else f"{rotated / 2}"
        rope_fields(text).fail("mrope_section", f"does not add up to {part} of `head_dim` {spec.head_dim}")
    return spec


def read_vision_config(folder: Path) -> VisionConfig:
    """Read the vision encoder's configuration of the checkpoint in `folder`.

    Raises:
        CheckpointError: `config.json` is missing or invalid, or requires an unsupported feature.
    """
    vision = read_config(folder, MODEL_TYPE).section("vision_config").with_defaults(VISION_DEFAULTS)
    inner = int(vision.integer("embed_dim") * vision.number("mlp_ratio"))
    return shared_vision_config(vision, VISION_ACTIVATIONS, width="embed_dim", output=OUTPUT_SIZE, inner=inner)


def shared_vision_config(
    vision: JsonFields,
    activations: Sequence[str],
    *,
    width: str = "hidden_size",
    output: str = "out_hidden_size",
    inner: int | None = None,
) -> VisionConfig:
    """Return a vision encoder from the fields of `vision_config` that families share.

    Args:
        vision: the section.
        activations: the supported values of `hidden_act`; the first one is the default.
        width: the name of the field with the hidden size.
        output: the name of the field with the size of a visual token.
        inner: the inner size of an MLP; `intermediate_size` by default.

    Raises:
        CheckpointError: a field is missing or invalid, or requires an unsupported feature.
    """
    _check_vision_encoder(vision, activations)
    hidden_size = vision.integer(width)
    heads = vision.integer("num_heads")
    if hidden_size % (4 * heads):  # as 2-D rotary embedding requires
        vision.fail("num_heads", f"does not divide `{width}` {hidden_size} into heads whose width is a multiple of 4")
    return VisionConfig(
        depth=vision.integer("depth"),
        hidden_size=hidden_size,
        intermediate_size=inner or vision.integer("intermediate_size"),
        output_size=vision.integer(output),
        num_heads=heads,
        patch_size=vision.integer("patch_size"),
        temporal_patch_size=vision.integer("temporal_patch_size", default=2),
        spatial_merge_size=vision.integer("spatial_merge_size"),
        hidden_act=str(vision.get("hidden_act") or activations[0]),
    )


def read_spec(folder: Path) -> ModelSpec:
    """Read the `ModelSpec` of the checkpoint in `folder`.

    Raises:
        CheckpointError: a file is missing or invalid, files contradict each other, or they require an unsupported
            feature.
    """
    config = read_config(folder, MODEL_TYPE)
    return model_spec(
        config,
        text_model_spec(config),
        read_vision_config(folder),
        coordinates=CoordinateSpec(extent=1000, pairs=True),
        output=OUTPUT_SIZE,
    )


def model_spec(
    config: JsonFields,
    text: TextModelSpec,
    vision: VisionConfig,
    *,
    coordinates: CoordinateSpec,
    output: str = "out_hidden_size",
    visual_outputs: tuple[str, ...] = ("visual.merger.mlp.2",),
) -> ModelSpec:
    """Return the `ModelSpec` of a checkpoint with the files and the image processor of Qwen2-VL.

    Args:
        config: its `config.json`.
        text: its text model.
        vision: its vision encoder.
        coordinates: see `ModelSpec`.
        output: the name of the field with the size of a visual token.
        visual_outputs: as in `ModelSpec`.

    Raises:
        CheckpointError: a file is missing or invalid, files contradict each other, or they require an unsupported
            feature.
    """
    folder = config.file.parent
    if vision.output_size != text.hidden_size:
        config.fail(f"vision_config.{output}", f"is {vision.output_size}, but the text model's is {text.hidden_size}")
    return ModelSpec(
        folder=folder,
        model_type=str(config.get("model_type")),
        max_model_len=text.max_position_embeddings,
        dtype=stored_dtype(config),
        pixels=_pixel_spec(folder, vision),
        tokens=TokenSpec(
            image=config.integer("image_token_id"),
            video=config.integer("video_token_id"),
            stop=read_stop_tokens(folder, (config, text_fields(config))),
        ),
        text=text,
        video=VideoSamplingPolicy(),
        conversation=HERMES,
        profile=Profile(),
        tensor_renames=TENSOR_RENAMES,
        coordinates=coordinates,
        vision_weights=vision.num_weights,
        visual_outputs=visual_outputs,
        rotated=config.get(ROTATION) is not None,
    )


def read_config(folder: Path, *model_types: str, tokens: Mapping[str, int] = TOKENS) -> JsonFields:
    """Read `config.json`, or the part of it for the model that a retrieval model extends, and check the architecture.

    Args:
        folder: the checkpoint's folder.
        model_types: the supported values of `model_type`.
        tokens: the token ids where it does not have them.

    Raises:
        CheckpointError: it is missing or invalid, or its `model_type` is not one of `model_types`.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder. Set `model` to the folder of a checkpoint.")
    config = extended_fields(read_fields(folder / CONFIG))
    if config.get("model_type") not in model_types:
        supported = " and ".join(map(repr, model_types))
        config.fail("model_type", f"is {config.get('model_type')!r}", f"Only {supported} checkpoints are supported.")
    return config.with_defaults(tokens)


def text_fields(config: JsonFields) -> JsonFields:
    """Return the text model's fields: those of `text_config`, or else those at the top level."""
    return config if config.get("text_config") is None else config.section("text_config")


def _check_text_model(text: JsonFields) -> None:
    if text.get("hidden_act") not in (None, "silu"):
        text.fail("hidden_act", f"is {text.get('hidden_act')!r}", "Only 'silu' is supported.")
    if text.flag("use_sliding_window") or "sliding_attention" in (text.get("layer_types") or ()):
        text.fail("use_sliding_window", "requires sliding-window attention", "Only full attention is supported.")


def _check_vision_encoder(vision: JsonFields, activations: Sequence[str]) -> None:
    if vision.get("hidden_act") not in (None, *activations):
        vision.fail("hidden_act", f"is {vision.get('hidden_act')!r}", f"Supported are {', '.join(activations)}.")
    if any(vision.get(name) not in (None, 3) for name in ("in_channels", "in_chans")):
        vision.fail("in_channels", "is not 3", "Only vision encoders with RGB input are supported.")
    for name, expected in (("rope_type", "axial"), ("rope_theta", VISION_ROPE_THETA)):
        value = (vision.get("rope_parameters") or {}).get(name)
        if value not in (None, expected):
            vision.fail(f"rope_parameters.{name}", f"is {value!r}", f"Only {expected!r} is supported.")


def rope_fields(text: JsonFields) -> JsonFields:
    """Return the text model's rotary options, under either of their names; only plain M-RoPE is supported."""
    rope = text.section("rope_parameters" if text.get("rope_parameters") is not None else "rope_scaling")
    for name in ("type", "rope_type"):
        if rope.get(name) not in (None, "mrope", "default"):
            rope.fail(name, f"is {rope.get(name)!r}", "Only plain M-RoPE ('mrope' or 'default') is supported.")
    return rope


def _rope_theta(text: JsonFields) -> float:
    rope = rope_fields(text)
    return (rope if rope.get("rope_theta") is not None else text).number("rope_theta")


def mrope_section(text: JsonFields) -> tuple[int, int, int]:
    """Return the numbers of rotary frequencies for time, height and width."""
    return rope_fields(text).integers("mrope_section")


def stored_dtype(config: JsonFields) -> str:
    """Return the stored dtype: `dtype` or `torch_dtype`, at the top level or in `text_config`."""
    values = [fields.get(name) for fields in (config, text_fields(config)) for name in ("dtype", "torch_dtype")]
    dtype = next((value for value in values if value is not None), None)
    if dtype not in DTYPES:
        config.fail("dtype", "is missing" if dtype is None else f"is {dtype!r}", _DTYPE_STEP)
    return str(dtype)


def _pixel_spec(folder: Path, vision: VisionConfig) -> PixelSpec:
    fields = _preprocessor(folder)
    expected = {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
    }
    for name, value in expected.items():
        if fields.get(name) not in (None, value):
            fields.fail(name, f"is {fields.get(name)!r}, but {CONFIG} has {value}")
    return PixelSpec(
        **expected,
        min_pixels=pixel_limit(fields, "min_pixels", "shortest_edge"),
        max_pixels=pixel_limit(fields, "max_pixels", "longest_edge"),
        mean=fields.triple("image_mean"),
        std=fields.triple("image_std"),
    )


def _preprocessor(folder: Path) -> JsonFields:
    """Read `preprocessor_config.json`, or the section of `processor_config.json` where transformers 5 writes it."""
    if not (folder / PREPROCESSOR).exists() and (folder / PROCESSOR).exists():
        return read_fields(folder / PROCESSOR).section("image_processor")
    return read_fields(folder / PREPROCESSOR)


def pixel_limit(fields: JsonFields, name: str, edge: str) -> int:
    """Return a limit in pixels. Newer files name it as an edge of `size`, although its unit is pixels there too."""
    return fields.integer(name) if fields.get(name) is not None else fields.section("size").integer(edge)
