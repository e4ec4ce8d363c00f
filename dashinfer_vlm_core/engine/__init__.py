"""The stages of a request, and the engine around them."""

from .engine import ChatEngine, Engine, EngineStats, EngineStatus, Request, State, choose_decoder, open_conductor

__all__ = [
    "ChatEngine",
    "Engine",
    "EngineStats",
    "EngineStatus",
    "Request",
    "State",
    "choose_decoder",
    "open_conductor",
]
