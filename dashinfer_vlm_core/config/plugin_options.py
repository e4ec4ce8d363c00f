"""Options of plugins, which are set like those of `EngineConfig`."""

from __future__ import annotations

import functools
import threading
from typing import ClassVar, get_origin

import pluggy
from pydantic import ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from ..errors import PluginError
from ..hookspecs.discovery import call_hooks, plugin_entries

ENV_PREFIX = "DASHINFER_VLM_"


class PluginOptions(BaseSettings):
    """Base class of a plugin's options: fields with a type, a default and a description.

    A plugin registers its class through `register_options`. Each field is then an option of the command line, the
    configuration file, the environment (`DASHINFER_VLM_` and its name in upper case) and `EngineConfig(...)`. The
    plugin reads them with `config.options_of(Class)`. The engine and all plugins share one namespace: start ambiguous
    names with the plugin's name.

    Attributes:
        title: heading of their section in the help.
    """

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", enable_decoding=False
    )

    title: ClassVar[str] = "Plugins"

    @field_validator("*", mode="before")
    @classmethod
    def _split(cls, value: object, info: ValidationInfo) -> object:
        """Split comma-separated lists from the environment and the command line."""
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, str) and get_origin(field.annotation) in (tuple, list):
            return [item.strip() for item in value.split(",") if item.strip()]
        return value

    def check(self, decoder: str) -> None:
        """Reject values that the selected decoder does not support.

        Args:
            decoder: the decoder's registered name.

        Raises:
            ConfigError: a value is not supported; the message contains the option and the next step.
        """


def check_options(kind: object) -> type[PluginOptions]:
    """Check an options class that a plugin registers, and return it.

    Raises:
        PluginError: it is not a subclass of `PluginOptions`, or one of its fields has no default.
    """
    if not (isinstance(kind, type) and issubclass(kind, PluginOptions)):
        raise PluginError(f"Options must be a subclass of PluginOptions, got {kind!r}.")
    try:
        kind.model_construct()
    except Exception as error:
        raise PluginError(f"A default of the options {kind.__name__} raises an error: {error}") from error
    if required := [name for name, field in kind.model_fields.items() if field.is_required()]:
        raise PluginError(f"The option {required[0]!r} of {kind.__name__} must have a default.")
    return kind


def option_classes(reserved: frozenset[str]) -> tuple[type[PluginOptions], ...]:
    """Return the options classes that installed plugins register; searched once per process.

    A plugin that is broken, or registers an existing name, is skipped. `dashinfer-vlm plugins` lists it with the fix.

    Args:
        reserved: names of the options of EngineConfig.
    """
    with _LOCK:
        # A plugin that is being imported may define a command or create an EngineConfig. It needs the options of all
        # plugins, but its own, which are not defined yet; the result is not kept.
        return _find(reserved) if _IMPORTING else _search(reserved)


def forget_options() -> None:
    """Clear the cache of `option_classes`, after plugins have been installed."""
    _search.cache_clear()


_LOCK = threading.RLock()
_IMPORTING: list[str] = []
"""Names of the plugins whose import is in progress."""


@functools.lru_cache(maxsize=8)
def _search(reserved: frozenset[str]) -> tuple[type[PluginOptions], ...]:
    return _find(reserved)


def _find(reserved: frozenset[str]) -> tuple[type[PluginOptions], ...]:
    found: list[type[PluginOptions]] = []
    names, plugins = set(reserved), set(_IMPORTING)
    for entry in plugin_entries():
        if entry.name in plugins:
            continue
        plugins.add(entry.name)
        classes: list[type[PluginOptions]] = []
        _IMPORTING.append(entry.name)
        try:
            usable = call_hooks(entry, functools.partial(_register, classes))
        finally:
            _IMPORTING.pop()
        option_names = [name for kind in classes for name in kind.model_fields]
        if usable and names.isdisjoint(option_names):
            found += classes
            names.update(option_names)
    return tuple(found)


def _register(classes: list[type[PluginOptions]], hook: pluggy.HookRelay) -> None:
    hook.register_options(register=lambda kind: classes.append(check_options(kind)))
