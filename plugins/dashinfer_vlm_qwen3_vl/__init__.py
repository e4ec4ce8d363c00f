"""Qwen3-VL, dense and with a mixture of experts. Importing this package is cheap: torch is imported when a vision
encoder is loaded.

config.py                            the checkpoint's JSON files
image_processor.py  prompt_layout.py images and videos as patches, and in the prompt
position_table.py  vision_model.py   the vision encoder with DeepStack
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from dashinfer_vlm_core import hookimpl
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.kernels.choice import KernelSelector
from dashinfer_vlm_core.models.interface import ImageProcessor, ModelFamily, PromptLayout, VisionEncoder
from dashinfer_vlm_core.models.lora import LoraWeights
from dashinfer_vlm_core.models.spec import ModelSpec

from .config import MODEL_TYPES, read_spec, read_video_pixels, read_vision_config

__all__ = ["Qwen3VL", "register_model_families"]


class Qwen3VL:
    """The family of Qwen3-VL checkpoints: 2B, 4B, 8B and 32B, and 30B-A3B and 235B-A22B with a mixture of experts."""

    model_types: frozenset[str] = frozenset(MODEL_TYPES)

    def load_spec(self, folder: Path) -> ModelSpec:
        return read_spec(folder)

    def image_processor(self, spec: ModelSpec, config: EngineConfig) -> ImageProcessor:
        from .image_processor import Qwen3VLImageProcessor

        return Qwen3VLImageProcessor(spec.pixels, read_video_pixels(spec.folder, spec.pixels), config)

    def prompt_layout(self, spec: ModelSpec) -> PromptLayout:
        from .prompt_layout import load_prompt_layout

        return load_prompt_layout(spec)

    def load_vision_encoder(
        self, spec: ModelSpec, config: EngineConfig, kernels: KernelSelector, lora: LoraWeights | None = None
    ) -> VisionEncoder:
        from dashinfer_vlm_core.models.qwen2_vl.vit import load_encoder

        from .vision_model import load_vision_model

        load_model = partial(load_vision_model, read_vision_config(spec.folder))
        return load_encoder(spec, config, kernels, lora, load_model)


@hookimpl
def register_model_families(register: Callable[[ModelFamily], None]) -> None:
    register(Qwen3VL())
