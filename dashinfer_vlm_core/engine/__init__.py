"""The stages of a request, and the engine around them."""

from .engine import ChatEngine, Engine, EngineStats, EngineStatus, Request, State, load_pipeline, select_decoder

__all__ = [
    "ChatEngine",
    "Engine",
    "EngineStats",
    "EngineStatus",
    "Request",
    "State",
    "load_pipeline",
    "select_decoder",
]
