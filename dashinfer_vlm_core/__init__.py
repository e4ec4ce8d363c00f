"""Serve vision-language models on your own machines, for requests with images and videos."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .config import EngineConfig
    from .engine import ChatEngine, Engine, EngineStatus
    from .errors import DashInferVLMError, EngineError, MediaError, RequestError, SetupError
    from .hooks import hookimpl
    from .models.coordinates import ImageCoordinates
    from .offline import VLM, LoRARequest, SamplingParams, StructuredOutputsParams
    from .protocol import ChatRequest

__all__ = [
    "VLM",
    "ChatEngine",
    "ChatRequest",
    "DashInferVLMError",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineStatus",
    "ImageCoordinates",
    "LoRARequest",
    "MediaError",
    "RequestError",
    "SamplingParams",
    "SetupError",
    "StructuredOutputsParams",
    "__version__",
    "hookimpl",
]

# Names are imported lazily, so that a plugin that imports only `hookimpl` does not import the engine.
_MODULES = {
    "config": ("EngineConfig",),
    "engine": ("ChatEngine", "Engine", "EngineStatus"),
    "errors": ("DashInferVLMError", "EngineError", "MediaError", "RequestError", "SetupError"),
    "hooks": ("hookimpl",),
    "models.coordinates": ("ImageCoordinates",),
    "offline": ("VLM", "LoRARequest", "SamplingParams", "StructuredOutputsParams"),
    "protocol": ("ChatRequest",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
