"""The engine of a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from dashinfer_vlm_core.engine import Engine
from dashinfer_vlm_core.engine.managed_models import ManagedModel, configure_models
from dashinfer_vlm_core.engine.manager import ModelManager
from dashinfer_vlm_core.engine.model_rules import ModelPolicy

if TYPE_CHECKING:
    from dashinfer_vlm_core.config import EngineConfig

    from .model_options import ModelOptions

LocalEngine: TypeAlias = Engine | ModelManager
"""An engine of this process, which the server starts and closes."""


def create_engine(config: EngineConfig, models: Sequence[tuple[str, object]], options: ModelOptions) -> LocalEngine:
    """Create the engine of a server: one that manages models only if an option requires it.

    Args:
        config: the model, or what all models share.
        models: for each name its options; none for a single model.
        options: when models are loaded and unloaded.

    Raises:
        ConfigError: the options of a model are invalid, two have the same name, or one needs more than the limit.
        CheckpointError: there is no such model.
    """
    if not models and options.memory_limit is None and options.idle_unload is None:
        return Engine(config)
    policy = ModelPolicy(
        memory_limit=None if options.memory_limit is None else int(options.memory_limit),
        idle_unload=options.idle_unload,
        max_wait=options.model_wait,
    )
    return ModelManager(configure_models(config, models) or (ManagedModel(config=config),), policy=policy)
