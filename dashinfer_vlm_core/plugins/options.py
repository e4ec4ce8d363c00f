"""Compose the options of an engine: those of EngineConfig and those of plugins."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ..config import EngineConfig, PluginOptions
from ..config.engine_config import config_error

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


def resolve_options(config: EngineConfig, classes: Iterable[type[PluginOptions]]) -> EngineConfig:
    """Return `config` with the values of the options of `classes` that are given or set by the environment.

    Raises:
        ConfigError: an option is unknown, or values are out of range; the message contains all of them.
    """
    unknown = dict(config.plugin_options)
    resolved: dict[str, Any] = {}
    errors: list[ErrorDetails] = []
    for kind in classes:
        given = {name: unknown.pop(name) for name in kind.model_fields if name in unknown}
        try:
            options = kind(**given)
        except ValidationError as error:
            errors += error.errors(include_url=False)
        else:
            resolved |= {name: value for name, value in options if name in options.model_fields_set}
    errors += [{"type": "extra_forbidden", "loc": (name,), "msg": "", "input": unknown[name]} for name in unknown]
    if errors:
        raise config_error(errors, config.plugin_options)
    return config.model_copy(update=resolved)
