"""Qwen2.5-VL. Importing this package is cheap: torch is imported when a vision encoder is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.hooks import hookimpl
from dashinfer_vlm_core.kernels.choice import KernelSelector
from dashinfer_vlm_core.models.interface import ImageProcessor, ModelFamily, PromptLayout, VisionEncoder
from dashinfer_vlm_core.models.lora import LoraWeights
from dashinfer_vlm_core.models.spec import ModelSpec

from .config import MODEL_TYPE, read_spec, read_vision_config


class Qwen25VL:
    """The family of Qwen2.5-VL checkpoints: 3B, 7B, 32B and 72B.

    The text model and the image processor are those of Qwen2-VL.
    """

    model_types: frozenset[str] = frozenset({MODEL_TYPE})

    def load_spec(self, folder: Path) -> ModelSpec:
        return read_spec(folder)

    def image_processor(self, spec: ModelSpec, config: EngineConfig) -> ImageProcessor:
        from dashinfer_vlm_core.models.qwen2_vl.image_processor import Qwen2VLImageProcessor

        return Qwen2VLImageProcessor(spec.pixels, config)

    def prompt_layout(self, spec: ModelSpec) -> PromptLayout:
        from .prompt_layout import Qwen25VLPromptLayout

        return Qwen25VLPromptLayout(spec)

    def load_vision_encoder(
        self, spec: ModelSpec, config: EngineConfig, kernels: KernelSelector, lora: LoraWeights | None = None
    ) -> VisionEncoder:
        from dashinfer_vlm_core.models.qwen2_vl.vit import load_encoder

        from .vit import load_vision_model

        load_model = partial(load_vision_model, read_vision_config(spec.folder))
        return load_encoder(spec, config, kernels, lora, load_model)


@hookimpl
def register_model_families(register: Callable[[ModelFamily], None]) -> None:
    register(Qwen25VL())
