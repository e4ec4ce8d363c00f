"""Compose the options of an engine: those of EngineConfig and those of plugins."""

from __future__ import annotations

import functools

from pydantic import create_model

from ..config import EngineConfig, PluginOptions


def resolve_options(config: EngineConfig, classes: tuple[type[PluginOptions], ...]) -> EngineConfig:
    """Return `config` with the values of the options of `classes` that are given or set by the environment.

    Raises:
        ConfigError: an option is unknown, or values are out of range; the message contains all of them.
    """
    options = _combined(classes)(**config.plugin_options)
    return config.model_copy(update={name: value for name, value in options if name in options.model_fields_set})


@functools.lru_cache(maxsize=4)
def _combined(classes: tuple[type[PluginOptions], ...]) -> type[PluginOptions]:
    """One class with the options of all, so that one error contains all invalid ones."""
    return create_model("InstalledOptions", __base__=classes or (PluginOptions,))
