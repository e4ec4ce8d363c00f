"""Qwen2-VL, the built-in family. Importing this package is cheap: torch is imported when a vision encoder is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from ...config import EngineConfig
from ...hooks import hookimpl
from ...kernels.choice import KernelSelector
from ..interface import ImageProcessor, ModelFamily, PromptLayout, VisionEncoder
from ..lora import LoraWeights
from ..spec import ModelSpec
from .config import MODEL_TYPE, read_spec, read_vision_config


class Qwen2VL:
    """The family of Qwen2-VL checkpoints: 2B, 7B and 72B."""

    model_types: frozenset[str] = frozenset({MODEL_TYPE})

    def load_spec(self, folder: Path) -> ModelSpec:
        return read_spec(folder)

    def image_processor(self, spec: ModelSpec, config: EngineConfig) -> ImageProcessor:
        from .image_processor import Qwen2VLImageProcessor

        return Qwen2VLImageProcessor(spec.pixels, config)

    def prompt_layout(self, spec: ModelSpec) -> PromptLayout:
        from .prompt_layout import Qwen2VLPromptLayout

        return Qwen2VLPromptLayout(spec)

    def load_vision_encoder(
        self, spec: ModelSpec, config: EngineConfig, kernels: KernelSelector, lora: LoraWeights | None = None
    ) -> VisionEncoder:
        from .vit import load_encoder, load_vision_model

        load_model = partial(load_vision_model, read_vision_config(spec.folder))
        return load_encoder(spec, config, kernels, lora, load_model)


@hookimpl
def register_model_families(register: Callable[[ModelFamily], None]) -> None:
    register(Qwen2VL())
