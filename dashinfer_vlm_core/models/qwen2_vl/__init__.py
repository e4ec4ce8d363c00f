"""Qwen2-VL, the built-in family. Importing this package is cheap: torch is imported when a vision encoder is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ...config import EngineConfig
from ...hooks import hookimpl
from ...kernels.choice import KernelSelector
from ..interface import ImageProcessor, ModelFamily, PromptLayout, VisionEncoder
from ..lora import LoraWeights
from ..spec import ModelSpec
from .config import MODEL_TYPE, read_spec, read_vision_config

if TYPE_CHECKING:
    from .vision_weights import VisionWeights
    from .vit import VisionModel


class Qwen2VL:
    """The family of Qwen2-VL checkpoints: 2B, 7B and 72B. Later families override what differs."""

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
        from .pass_graphs import pass_graphs
        from .vision_weights import VisionWeights
        from .vit import Qwen2VLEncoder

        with VisionWeights.open(spec, config, kernels, lora) as weights:
            model = self.load_vision_model(spec.folder, weights)
            return Qwen2VLEncoder(model, spec.pixels, graphs=pass_graphs(config, weights.kernels, weights.device))

    def load_vision_model(self, folder: Path, read: VisionWeights) -> VisionModel:
        """Load the vision encoder's model from an opened checkpoint; see `ModelFamily.load_vision_encoder`."""
        from .vision_weights import VisionLayout, load_vision_model
        from .vit import VisionModel

        return load_vision_model(VisionModel, read_vision_config(folder), read, VisionLayout())


@hookimpl
def register_model_families(register: Callable[[ModelFamily], None]) -> None:
    register(Qwen2VL())
