"""The chat pipeline, and the engine that runs it."""

from .engine import ChatEngine, Engine, EngineStats, EngineStatus, Request, State, load_pipeline, select_decoder
from .loras import LoraStatus

__all__ = [
    "ChatEngine",
    "Engine",
    "EngineStats",
    "EngineStatus",
    "LoraStatus",
    "Request",
    "State",
    "load_pipeline",
    "select_decoder",
]
