"""Parse the JSON files of a Qwen3-VL checkpoint, as published or as transformers 5 writes them.

Checkpoints that cannot be computed exactly as trained are rejected, and the error names the field.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import isqrt
from pathlib import Path

from dashinfer_vlm_core.media.frame_sampling import VideoSamplingPolicy
from dashinfer_vlm_core.models.coordinates import CoordinateSpec
from dashinfer_vlm_core.models.json_fields import JsonFields, read_fields
from dashinfer_vlm_core.models.qwen2_vl.config import (
    PREPROCESSOR,
    PROCESSOR,
    TOKENS,
    VisionConfig,
    attention_spec,
    model_spec,
    mrope_section,
    pixel_limit,
    read_config,
    rope_fields,
    shared_text_model,
    shared_vision_config,
    text_fields,
)
from dashinfer_vlm_core.models.spec import ModelSpec, PixelLimits, PixelSpec, Profile
from dashinfer_vlm_core.text_spec import ExpertsSpec, LayerSpec, MlpSpec, TextModelSpec
from dashinfer_vlm_core.tokenization.chat_template import template_mentions
from dashinfer_vlm_core.tokenization.conversation import HERMES

DENSE, MOE = "qwen3_vl", "qwen3_vl_moe"
MODEL_TYPES = (DENSE, MOE)
HYBRID_TYPES = ("qwen3_5", "qwen3_5_moe")
HYBRID_TOKENS = {
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
}
"""transformers' default values for the hybrid types."""
VISION_ACTIVATIONS = ("gelu_pytorch_tanh", "gelu")

RENAMES = (
    (r"\.experts\.(gate_up_proj|down_proj)$", r".experts.\1.weight"),
    (r"\.experts\.(gate_up_proj|down_proj)_scale_inv$", r".experts.\1.weight_scale_inv"),
)
"""Map the names of a tensor with the weights of all experts, and of its scales in FP8 checkpoints, to those that the
tensors of a module have."""

VIDEO_PREPROCESSOR = "video_preprocessor_config.json"

MIN_DIMENSIONS = 64
"""Qwen3-VL-Embedding was trained for embeddings of 64 and more dimensions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3VLVisionConfig(VisionConfig):
    """Shapes and constants of the vision encoder.

    Attributes:
        table_side: rows, and columns, of the table of learned positions.
        deepstack_layers: indices of the blocks whose output becomes an additional level of visual tokens, ascending.
    """

    table_side: int
    deepstack_layers: tuple[int, ...]

    @property
    def num_weights(self) -> int:
        return self.count_weights(mergers=1 + len(self.deepstack_layers)) + self.table_side**2 * self.hidden_size


def read_spec(folder: Path) -> ModelSpec:
    """Read the `ModelSpec` of the checkpoint in `folder`.

    Raises:
        CheckpointError: a file is missing or invalid, files contradict each other, or they require an unsupported
            feature.
    """
    config = read_config(folder, *MODEL_TYPES)
    spec = published_spec(config, _text_model(config), read_vision_config(folder))
    return replace(spec, min_dimensions=MIN_DIMENSIONS)


def published_spec(config: JsonFields, text: TextModelSpec, vision: Qwen3VLVisionConfig) -> ModelSpec:
    """Return the `ModelSpec` of a checkpoint with the files of Qwen3-VL.

    Raises:
        CheckpointError: a file is missing or invalid, or files contradict each other.
    """
    folder = config.file.parent
    spec = model_spec(
        config, text, vision, coordinates=CoordinateSpec(extent=1000), visual_outputs=_visual_outputs(vision)
    )
    return replace(
        spec,
        video=_sampling_policy(_video_fields(folder, spec.pixels)),
        profile=Profile(reasoning=template_mentions(folder, (HERMES.reasoning_begin, HERMES.reasoning_end))),
        tensor_renames=spec.tensor_renames + RENAMES,
    )


def _visual_outputs(vision: Qwen3VLVisionConfig) -> tuple[str, ...]:
    deepstack = [f"visual.deepstack_merger_list.{number}" for number in range(len(vision.deepstack_layers))]
    return tuple(f"{merger}.linear_fc2" for merger in ("visual.merger", *deepstack))


def read_vision_config(folder: Path) -> Qwen3VLVisionConfig:
    """Read the vision encoder's configuration of the checkpoint in `folder`.

    Raises:
        CheckpointError: `config.json` is missing or invalid, or requires an unsupported feature.
    """
    config = read_config(folder, *MODEL_TYPES)
    vision = config.section("vision_config")
    return vision_config(vision, _deepstack_layers(vision, text_fields(config).integer("num_hidden_layers")))


def vision_config(vision: JsonFields, deepstack_layers: tuple[int, ...]) -> Qwen3VLVisionConfig:
    """Return the vision encoder of `vision_config`.

    Raises:
        CheckpointError: a field is missing or invalid, or requires an unsupported feature.
    """
    spec = Qwen3VLVisionConfig(
        **asdict(shared_vision_config(vision, VISION_ACTIVATIONS)),
        table_side=isqrt(vision.integer("num_position_embeddings")),
        deepstack_layers=deepstack_layers,
    )
    if spec.table_side**2 != vision.get("num_position_embeddings"):
        vision.fail("num_position_embeddings", f"must be a square, got {vision.get('num_position_embeddings')}")
    return spec


def read_video_pixels(folder: Path, pixels: PixelSpec) -> PixelLimits:
    """Read the limits of all frames together of a resized video; the images of the checkpoint are processed as in
    `pixels`.

    Raises:
        CheckpointError: their file is missing or invalid, or contradicts `pixels`.
    """
    fields = _video_fields(folder, pixels)
    return PixelLimits(
        min_pixels=pixel_limit(fields, "min_pixels", "shortest_edge"),
        max_pixels=pixel_limit(fields, "max_pixels", "longest_edge"),
    )


def read_vision_tokens(folder: Path) -> tuple[int, int]:
    """Return the tokens that begin and end a span of visual tokens.

    Raises:
        CheckpointError: `config.json` is missing or invalid.
    """
    config = read_config(folder, *MODEL_TYPES, *HYBRID_TYPES, tokens={})
    config = config.with_defaults(HYBRID_TOKENS if config.get("model_type") in HYBRID_TYPES else TOKENS)
    return config.integer("vision_start_token_id"), config.integer("vision_end_token_id")


def _text_model(config: JsonFields) -> TextModelSpec:
    text = text_fields(config)
    if text.flag("attention_bias"):
        text.fail("attention_bias", "is true", "Only projections without biases are supported.")
    is_moe = config.get("model_type") == MOE
    head_dim = text.integer("hidden_size") // text.integer("num_attention_heads") if is_moe else 128
    attention = attention_spec(text, interleaved_axes(text), head_dim=head_dim, head_norms=True)
    mlps = _mlps(text, is_moe=is_moe)
    return replace(
        shared_text_model(config, [LayerSpec(mixer=attention, mlp=mlp) for mlp in mlps]),
        visual_levels=len(_deepstack_layers(config.section("vision_config"), len(mlps))),
    )


def interleaved_axes(text: JsonFields) -> tuple[int, ...]:
    """Return the axis of each frequency: height and width take turns with time, and time has the rest.

    Of the first `3 * section` frequencies of an axis, height has those of index 1, 4, 7 and so on, and width those of
    index 2, 5, 8 and so on.

    Raises:
        CheckpointError: a field is missing or invalid, or requires an unsupported feature.
    """
    rope = rope_fields(text)
    section = mrope_section(text)
    if rope.get("mrope_interleaved") is False:
        rope.fail("mrope_interleaved", "is false", "Only interleaved M-RoPE is supported.")
    axes = [0] * sum(section)
    for axis in (1, 2):
        indices = range(axis, 3 * section[axis], 3)
        if indices[-1] >= len(axes):
            rope.fail("mrope_section", f"has too many frequencies for one axis, {section[axis]} of {len(axes)}")
        for index in indices:
            axes[index] = axis
    return tuple(axes)


def _mlps(text: JsonFields, *, is_moe: bool) -> list[MlpSpec | ExpertsSpec]:
    count = text.integer("num_hidden_layers")
    dense = MlpSpec(intermediate_size=text.integer("intermediate_size"))
    if not is_moe:
        return [dense] * count
    experts = _experts(text)
    step = text.integer("decoder_sparse_step", default=1)
    dense_layers = text.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list) or not all(type(layer) is int for layer in dense_layers):
        text.fail("mlp_only_layers", f"must be indices of layers, got {dense_layers!r}")
    return [dense if layer in dense_layers or (layer + 1) % step else experts for layer in range(count)]


def _experts(text: JsonFields) -> ExpertsSpec:
    if text.get("norm_topk_prob") is False:
        text.fail("norm_topk_prob", "is false", "Only normalized probabilities of experts are supported.")
    # transformers 5 writes `num_local_experts`.
    count = text.integer("num_experts" if text.get("num_experts") is not None else "num_local_experts")
    spec = ExpertsSpec(
        num_experts=count,
        experts_per_token=text.integer("num_experts_per_tok"),
        intermediate_size=text.integer("moe_intermediate_size"),
    )
    if spec.experts_per_token > spec.num_experts:
        text.fail("num_experts_per_tok", f"is above `num_experts` {spec.num_experts}")
    return spec


def _deepstack_layers(vision: JsonFields, text_layers: int) -> tuple[int, ...]:
    layers = vision.get("deepstack_visual_indexes")
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        vision.fail_value("deepstack_visual_indexes", "must be indices of layers")
    if layers != sorted(set(layers)) or not all(0 <= layer < vision.integer("depth") for layer in layers):
        vision.fail("deepstack_visual_indexes", f"must be ascending indices below `depth`, got {layers}")
    if len(layers) >= text_layers:
        vision.fail("deepstack_visual_indexes", f"must be fewer than the {text_layers} layers of the text model")
    return tuple(layers)


def _video_fields(folder: Path, pixels: PixelSpec) -> JsonFields:
    """Return the preprocessing of videos, whose patches must be those of images.

    It is in its own file, in `processor_config.json`, where transformers 5 writes it, or that of images also applies to
    videos.
    """
    if (folder / VIDEO_PREPROCESSOR).exists():
        fields = read_fields(folder / VIDEO_PREPROCESSOR)
    elif not (folder / PREPROCESSOR).exists() and (folder / PROCESSOR).exists():
        fields = read_fields(folder / PROCESSOR).section("video_processor")
    else:
        fields = read_fields(folder / PREPROCESSOR)
    for name, expected in (
        ("patch_size", pixels.patch_size),
        ("temporal_patch_size", pixels.temporal_patch_size),
        ("merge_size", pixels.merge_size),
        ("image_mean", list(pixels.mean)),
        ("image_std", list(pixels.std)),
    ):
        if fields.get(name) not in (None, expected):
            fields.fail(name, f"is {fields.get(name)!r}, but that of images is {expected!r}")
    return fields


def _sampling_policy(fields: JsonFields) -> VideoSamplingPolicy:
    """Return transformers' sampling, which pads an odd number of frames instead of rounding it down."""
    defaults = VideoSamplingPolicy()
    return VideoSamplingPolicy(
        fps=defaults.fps if fields.get("fps") is None else fields.number("fps"),
        min_frames=fields.integer("min_frames", default=defaults.min_frames),
        max_frames=fields.integer("max_frames", default=defaults.max_frames),
        frame_factor=1,
        precision="float64",
    )
