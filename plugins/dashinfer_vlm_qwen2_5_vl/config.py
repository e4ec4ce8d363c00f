"""Parse a checkpoint's `config.json` for the vision encoder and the positions of videos.

Everything else is in the files and fields of Qwen2-VL. Both layouts are supported, see
`dashinfer_vlm_core.models.qwen2_vl.config`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from dashinfer_vlm_core.models.coordinates import CoordinateSpec
from dashinfer_vlm_core.models.json_fields import JsonFields
from dashinfer_vlm_core.models.qwen2_vl.config import (
    VisionConfig,
    model_spec,
    read_config,
    shared_vision_config,
    text_model_spec,
)
from dashinfer_vlm_core.models.spec import ModelSpec

MODEL_TYPE = "qwen2_5_vl"
VISION_ACTIVATIONS = ("silu",)

VISION_DEFAULTS = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "tokens_per_second": 4,
}
"""transformers' default values. The published checkpoints set `hidden_size` 1280 and `tokens_per_second` 2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen25VLVisionConfig(VisionConfig):
    """Shapes and constants of the vision encoder and of the positions of its visual tokens.

    Attributes:
        window: side of an attention window, in merge units: `window_size` pixels.
        fullatt_block_indexes: the blocks that attend to whole frames instead of windows.
        tokens_per_second: temporal positions per second of a video.
    """

    window: int
    fullatt_block_indexes: frozenset[int]
    tokens_per_second: int

    @property
    def num_weights(self) -> int:
        return self.count_weights(mlp_matrices=3)


def read_vision_config(folder: Path) -> Qwen25VLVisionConfig:
    """Read the vision encoder's configuration of the checkpoint in `folder`.

    Raises:
        CheckpointError: `config.json` is missing or invalid, or requires an unsupported feature.
    """
    vision = read_config(folder, MODEL_TYPE).section("vision_config").with_defaults(VISION_DEFAULTS)
    return Qwen25VLVisionConfig(
        **asdict(shared_vision_config(vision, VISION_ACTIVATIONS)),
        window=_window(vision),
        fullatt_block_indexes=_full_attention_blocks(vision),
        tokens_per_second=vision.integer("tokens_per_second"),
    )


def read_spec(folder: Path) -> ModelSpec:
    """Read the `ModelSpec` of the checkpoint in `folder`.

    Raises:
        CheckpointError: a file is missing or invalid, files contradict each other, or they require an unsupported
            feature.
    """
    config = read_config(folder, MODEL_TYPE)
    vision = read_vision_config(folder)
    return model_spec(config, text_model_spec(config), vision, coordinates=CoordinateSpec(extent=None))


def _window(vision: JsonFields) -> int:
    size = vision.integer("window_size")
    unit = vision.integer("spatial_merge_size") * vision.integer("patch_size")
    if size < unit:
        vision.fail("window_size", f"is {size}, less than the {unit} pixels of a visual token")
    return size // unit


def _full_attention_blocks(vision: JsonFields) -> frozenset[int]:
    value = vision.get("fullatt_block_indexes")
    depth = vision.integer("depth")
    if not isinstance(value, list) or not all(type(index) is int and 0 <= index < depth for index in value):
        vision.fail_value("fullatt_block_indexes", f"must be a list of blocks from 0 to {depth - 1}")
    return frozenset(value)
