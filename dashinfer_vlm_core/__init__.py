"""Ask Qwen2-VL models about pictures and videos, on your own machines."""

from __future__ import annotations

from .config import EngineConfig
from .engine import ChatEngine, Engine, EngineStatus
from .errors import (
    DashInferVLMError,
    EngineError,
    MediaError,
    RequestError,
    SetupError,
)
from .hookspecs import hookimpl
from .schema import ChatRequest
from .version import __version__

__all__ = [
    "ChatEngine",
    "ChatRequest",
    "DashInferVLMError",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineStatus",
    "MediaError",
    "RequestError",
    "SetupError",
    "__version__",
    "hookimpl",
]
