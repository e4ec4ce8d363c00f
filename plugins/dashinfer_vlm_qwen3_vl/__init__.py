"""Qwen3-VL and Qwen3.5, dense and with a mixture of experts. Importing this package is cheap: torch is imported when a
vision encoder is loaded.

config.py  qwen3_5.py                the checkpoint's JSON files
image_processor.py  prompt_layout.py images and videos as patches, and in the prompt
position_table.py  vision_model.py   the vision encoder with DeepStack
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.hooks import hookimpl
from dashinfer_vlm_core.models.interface import ImageProcessor, ModelFamily, PromptLayout
from dashinfer_vlm_core.models.qwen2_vl import Qwen2VL
from dashinfer_vlm_core.models.spec import ModelSpec

from . import qwen3_5
from .config import HYBRID_TYPES, MODEL_TYPES, read_spec, read_video_pixels, read_vision_config

if TYPE_CHECKING:
    from dashinfer_vlm_core.models.qwen2_vl.vision_weights import VisionWeights
    from dashinfer_vlm_core.models.qwen2_vl.vit import VisionModel


class Qwen3VL(Qwen2VL):
    """The family of Qwen3-VL checkpoints: 2B, 4B, 8B and 32B, and 30B-A3B and 235B-A22B with a mixture of experts."""

    model_types: frozenset[str] = frozenset(MODEL_TYPES)

    def load_spec(self, folder: Path) -> ModelSpec:
        return read_spec(folder)

    def image_processor(self, spec: ModelSpec, config: EngineConfig) -> ImageProcessor:
        from .image_processor import Qwen3VLImageProcessor

        return Qwen3VLImageProcessor(spec.pixels, read_video_pixels(spec.folder, spec.pixels), config)

    def prompt_layout(self, spec: ModelSpec) -> PromptLayout:
        from .prompt_layout import Qwen3VLPromptLayout

        return Qwen3VLPromptLayout(spec)

    def load_vision_model(self, folder: Path, read: VisionWeights) -> VisionModel:
        from .vision_model import load

        return load(read_vision_config(folder), read)


class Qwen35(Qwen3VL):
    """The family of Qwen3.5, Qwen3.6 and Qwen3.8 checkpoints: the vision encoder without DeepStack, and a text model of
    gated delta nets and attention."""

    model_types: frozenset[str] = frozenset(HYBRID_TYPES)

    def load_spec(self, folder: Path) -> ModelSpec:
        return qwen3_5.read_spec(folder)

    def load_vision_model(self, folder: Path, read: VisionWeights) -> VisionModel:
        from .vision_model import load

        return load(qwen3_5.read_vision_config(folder), read)


@hookimpl
def register_model_families(register: Callable[[ModelFamily], None]) -> None:
    register(Qwen3VL())
    register(Qwen35())
