"""The chat pipeline, and the engine that runs it."""

from .engine import AnyOcrRequest, ChatEngine, Engine, EngineStats, EngineStatus, LoopEngine, Request, State
from .late_interaction import TokenEmbeddings
from .loading import load_pipeline, select_decoder
from .loras import LoraStatus
from .pooling_pipeline import PoolingResult

__all__ = [
    "AnyOcrRequest",
    "ChatEngine",
    "Engine",
    "EngineStats",
    "EngineStatus",
    "LoopEngine",
    "LoraStatus",
    "PoolingResult",
    "Request",
    "State",
    "TokenEmbeddings",
    "load_pipeline",
    "select_decoder",
]
