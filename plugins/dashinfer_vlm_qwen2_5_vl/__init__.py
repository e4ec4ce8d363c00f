"""Qwen2.5-VL. Importing this package is cheap: torch is imported when a vision encoder is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dashinfer_vlm_core.hooks import hookimpl
from dashinfer_vlm_core.models.interface import ModelFamily, PromptLayout
from dashinfer_vlm_core.models.qwen2_vl import Qwen2VL
from dashinfer_vlm_core.models.spec import ModelSpec

from .config import MODEL_TYPE, read_spec, read_vision_config

if TYPE_CHECKING:
    from dashinfer_vlm_core.models.qwen2_vl.vision_weights import VisionWeights
    from dashinfer_vlm_core.models.qwen2_vl.vit import VisionModel


class Qwen25VL(Qwen2VL):
    """The family of Qwen2.5-VL checkpoints: 3B, 7B, 32B and 72B.

    The text model and the image processor are those of Qwen2-VL.
    """

    model_types: frozenset[str] = frozenset({MODEL_TYPE})

    def load_spec(self, folder: Path) -> ModelSpec:
        return read_spec(folder)

    def prompt_layout(self, spec: ModelSpec) -> PromptLayout:
        from .prompt_layout import Qwen25VLPromptLayout

        return Qwen25VLPromptLayout(spec)

    def load_vision_model(self, folder: Path, read: VisionWeights) -> VisionModel:
        from .vit import load

        return load(read_vision_config(folder), read)


@hookimpl
def register_model_families(register: Callable[[ModelFamily], None]) -> None:
    register(Qwen25VL())
