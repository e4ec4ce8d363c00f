"""The chat pipeline, and the engine that runs it."""

from .adapters import AdapterStatus
from .engine import ChatEngine, Engine, EngineStats, EngineStatus, LoopEngine, Request, State
from .loading import load_pipeline, select_decoder

__all__ = [
    "AdapterStatus",
    "ChatEngine",
    "Engine",
    "EngineStats",
    "EngineStatus",
    "LoopEngine",
    "Request",
    "State",
    "load_pipeline",
    "select_decoder",
]
