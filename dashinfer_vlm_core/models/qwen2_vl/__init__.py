"""Qwen2-VL: the built-in architecture. Importing this package is cheap; torch is imported when a tower is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...config import EngineConfig
from ...hookspecs import hookimpl
from ..interface import Architecture, VisionEncoder
from ..spec import ModelSpec
from .config import MODEL_TYPE, read_spec


class Qwen2VL:
    """Reads Qwen2-VL checkpoints: 2B, 7B and 72B alike."""

    model_type = MODEL_TYPE

    def read(self, folder: Path) -> ModelSpec:
        return read_spec(folder)

    def load_vision(self, spec: ModelSpec, config: EngineConfig) -> VisionEncoder:
        from .vit import load_encoder

        return load_encoder(spec, config)


@hookimpl
def register_architectures(register: Callable[[Architecture], None]) -> None:
    register(Qwen2VL())
