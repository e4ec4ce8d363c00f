"""The chat pipeline, and the engine that runs it."""

from ..deprecation import renamed_names
from .adapters import AdapterStatus
from .engine import ChatEngine, Engine, EngineStats, EngineStatus, Request, State, load_pipeline, select_decoder

__all__ = [
    "AdapterStatus",
    "ChatEngine",
    "Engine",
    "EngineStats",
    "EngineStatus",
    "Request",
    "State",
    "load_pipeline",
    "select_decoder",
]

__getattr__ = renamed_names(__name__, {"choose_decoder": "select_decoder", "open_conductor": "load_pipeline"})
