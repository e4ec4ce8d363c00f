"""The stages of a request, and the engine around them."""

from .engine import ChatEngine, Engine, EngineStats, EngineStatus, Request, State, select_decoder, load_pipeline

__all__ = [
    "ChatEngine",
    "Engine",
    "EngineStats",
    "EngineStatus",
    "Request",
    "State",
    "select_decoder",
    "load_pipeline",
]
