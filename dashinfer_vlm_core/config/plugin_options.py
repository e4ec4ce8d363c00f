"""Options of plugins, which are set like those of `EngineConfig`."""

from __future__ import annotations

from typing import ClassVar, get_origin

from pydantic import ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from ..errors import PluginError

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
