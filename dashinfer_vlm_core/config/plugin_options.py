"""Options of plugins, which are set in the same ways as those of `EngineConfig`."""

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

    A plugin registers its class by `register_options`. From then on, each field is an option of the command line, of
    the configuration file, of the environment (`DASHINFER_VLM_` and its name in upper case) and of `EngineConfig(...)`.
    The plugin reads them by `config.options_of(Class)`. Names are shared with the engine and other plugins: begin them
    with the plugin's name where they could mean something else.

    Attributes:
        title: of their section in the help.
    """

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", enable_decoding=False
    )

    title: ClassVar[str] = "Plugins"

    @field_validator("*", mode="before")
    @classmethod
    def _split(cls, value: object, info: ValidationInfo) -> object:
        """Lists are separated by commas in the environment and on the command line."""
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, str) and get_origin(field.annotation) in (tuple, list):
            return [item.strip() for item in value.split(",") if item.strip()]
        return value

    def check(self, decoder: str) -> None:
        """Refuse values that the selected decoder does not support.

        Args:
            decoder: its registered name.

        Raises:
            ConfigError: the message names the option, and the next step.
        """


def check_options(kind: object) -> type[PluginOptions]:
    """What a plugin registers as its options.

    Raises:
        PluginError: it is no subclass of `PluginOptions`, or a field of it has no default.
    """
    if not (isinstance(kind, type) and issubclass(kind, PluginOptions)):
        raise PluginError(f"Options have to be a subclass of PluginOptions, which {kind!r} is not.")
    try:
        kind.model_construct()
    except Exception as error:
        raise PluginError(f"The options {kind.__name__} have a default that fails: {error}") from error
    if required := [name for name, field in kind.model_fields.items() if field.is_required()]:
        raise PluginError(f"The option {required[0]!r} of {kind.__name__} needs a default.")
    return kind


def option_classes(taken: frozenset[str]) -> tuple[type[PluginOptions], ...]:
    """The classes that installed plugins register; looked for once in a process.

    A plugin that is broken, or registers a name that is taken, is skipped: `dashinfer-vlm plugins` lists it with the
    fix.

    Args:
        taken: names of the engine's own options.
    """
    with _LOCK:
        if _SEARCHES:  # a plugin's module makes a configuration while it is imported
            return tuple(_SEARCHES[-1])
        return _search(taken)


def forget_options() -> None:
    """Look for the options of plugins again, when others have been installed."""
    _search.cache_clear()


_LOCK = threading.RLock()
_SEARCHES: list[list[type[PluginOptions]]] = []


@functools.lru_cache(maxsize=8)
def _search(taken: frozenset[str]) -> tuple[type[PluginOptions], ...]:
    found: list[type[PluginOptions]] = []
    names, plugins = set(taken), set[str]()
    _SEARCHES.append(found)
    try:
        for entry in plugin_entries():
            classes: list[type[PluginOptions]] = []
            works = entry.name not in plugins and call_hooks(entry, functools.partial(_register, classes))
            wanted = [name for kind in classes for name in kind.model_fields]
            if works and names.isdisjoint(wanted):
                found += classes
                names.update(wanted)
            plugins.add(entry.name)
    finally:
        _SEARCHES.pop()
    return tuple(found)


def _register(classes: list[type[PluginOptions]], hook: pluggy.HookRelay) -> None:
    hook.register_options(register=lambda kind: classes.append(check_options(kind)))
