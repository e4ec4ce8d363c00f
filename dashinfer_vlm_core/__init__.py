"""Ask vision-language models about images and videos, on your own machines."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import EngineConfig
    from .engine import ChatEngine, Engine, EngineStatus
    from .errors import DashInferVLMError, EngineError, MediaError, RequestError, SetupError
    from .hookspecs import hookimpl
    from .offline import VLM, SamplingParams
    from .protocol import ChatRequest
    from .version import __version__

__all__ = [
    "VLM",
    "ChatEngine",
    "ChatRequest",
    "DashInferVLMError",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineStatus",
    "MediaError",
    "RequestError",
    "SamplingParams",
    "SetupError",
    "__version__",
    "hookimpl",
]

# Names are imported on use: a plugin that needs `hookimpl` alone must not pay for the engine.
_ROOMS = {
    "config": ("EngineConfig",),
    "engine": ("ChatEngine", "Engine", "EngineStatus"),
    "errors": ("DashInferVLMError", "EngineError", "MediaError", "RequestError", "SetupError"),
    "hookspecs": ("hookimpl",),
    "offline": ("VLM", "SamplingParams"),
    "protocol": ("ChatRequest",),
    "version": ("__version__",),
}


def __getattr__(name: str) -> Any:
    for room, names in _ROOMS.items():
        if name in names:
            return getattr(importlib.import_module(f".{room}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
