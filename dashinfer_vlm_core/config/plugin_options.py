"""Options that plugins bring; they are set as those of `EngineConfig` are, and stand beside them."""

from __future__ import annotations

import functools
from typing import ClassVar

import pluggy
from pydantic_settings import BaseSettings, SettingsConfigDict

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

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    title: ClassVar[str] = "Plugins"

    def check(self, decoder: str) -> None:
        """Refuse what cannot be honoured by the decoder that was chosen.

        Args:
            decoder: its registered name.

        Raises:
            ConfigError: the message names the option, and the next step.
        """


@functools.lru_cache(maxsize=8)
def option_classes(taken: frozenset[str]) -> tuple[type[PluginOptions], ...]:
    """The classes that installed plugins register.

    A plugin that is broken, or wants an option's name that is taken, costs its own options only: `dashinfer-vlm
    plugins` lists it with what would mend it.

    Args:
        taken: names of the engine's own options.
    """
    found: list[type[PluginOptions]] = []
    names = set(taken)
    for entry in plugin_entries():
        classes: list[type[PluginOptions]] = []
        call_hooks(entry, functools.partial(_register, classes))
        wanted = [name for options in classes for name in options.model_fields]
        if names.isdisjoint(wanted):
            found += classes
            names.update(wanted)
    return tuple(found)


def _register(classes: list[type[PluginOptions]], hook: pluggy.HookRelay) -> None:
    hook.register_options(register=classes.append)
