"""Base classes of options: their environment variables, and errors that name the option and its source."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, get_origin

from pydantic import ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from ..errors import ConfigError, PluginError
from ..protocol.validation_errors import validation_message
from .vllm_arguments import option_hint

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

ENV_PREFIX = "DASHINFER_VLM_"

VLLM_VARIABLES = {
    "image_fetch_timeout": "VLLM_IMAGE_FETCH_TIMEOUT",
    "video_fetch_timeout": "VLLM_VIDEO_FETCH_TIMEOUT",
}
"""vLLM's environment variables, used as fallback for options whose own variables are not set."""


class _Environment(EnvSettingsSource):
    """Our environment variables, else vLLM's."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        assert issubclass(self.settings_cls, Options)
        if field_name in self.settings_cls.python_only:
            return None, field_name, False
        value, key, is_complex = super().get_field_value(field, field_name)
        if value is None:
            value = os.environ.get(VLLM_VARIABLES.get(field_name, "")) or None
        return value, key, is_complex


class Options(BaseSettings):
    """Options that are fields with a type, a default and a docstring, which is the text of the help.

    Attributes:
        title: heading of their section in the help.
        python_only: names of fields that are no options: only Python code sets them.
        reference: what lists all options, for error messages.

    Raises:
        ConfigError: a value is out of range; the message contains the name of the option.
    """

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", enable_decoding=False
    )

    title: ClassVar[str] = "Options"
    python_only: ClassVar[frozenset[str]] = frozenset()
    reference: ClassVar[str] = "`dashinfer-vlm serve --help`"

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise self._config_error(error.errors(include_url=False), options) from None

    @classmethod
    def _config_error(cls, errors: Sequence[ErrorDetails], given: Mapping[str, Any]) -> ConfigError:
        # All errors in one line; `param` is the first option.
        texts = [_error_text(error, given) for error in errors]
        location = errors[0]["loc"]
        unknown = [str(error["loc"][0]) for error in errors if error["type"] == "extra_forbidden"]
        hints = [hint for name in unknown if (hint := option_hint(name, cls.known_options()))]
        message = " ".join([f"Invalid option {'; '.join(texts)}.", *hints, f"{cls.reference} lists every option."])
        return ConfigError(message, param=str(location[0]) if location else None)

    @classmethod
    def known_options(cls) -> list[str]:
        """Return the names to suggest in place of one that does not exist."""
        return list(cls.option_fields())

    @classmethod
    def option_fields(cls) -> dict[str, FieldInfo]:
        """Return the fields that are options, by name."""
        return {name: field for name, field in cls.model_fields.items() if name not in cls.python_only}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, _Environment(settings_cls)

    @field_validator("*", mode="before")
    @classmethod
    def _split(cls, value: object, info: ValidationInfo) -> object:
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, str) and get_origin(field.annotation) in (tuple, list):
            return [item.strip() for item in value.split(",") if item.strip()]
        return value


class PluginOptions(Options):
    """Base class of a plugin's options: fields with a type, a default and a docstring or `description`.

    A plugin registers its class through `register_options`. Each field is then an option of the command line, the
    configuration file, the environment (`DASHINFER_VLM_` and its name in upper case) and `EngineConfig(...)`. The
    plugin reads them with `config.options_of(Class)`. The engine and all plugins share one namespace: start ambiguous
    names with the plugin's name.
    """

    title: ClassVar[str] = "Plugins"

    @property
    def uses_mtp(self) -> bool:
        """Whether a head for multi-token prediction is loaded if a checkpoint has one, and nothing else drafts."""
        return True

    def check(self, decoder: str) -> None:
        """Reject values that the selected decoder does not support.

        Args:
            decoder: the decoder's registered name.

        Raises:
            ConfigError: a value is not supported; the message contains the option and the next step.
        """

    def check_combination(self, options: Mapping[str, Any]) -> None:
        """Reject values that cannot be combined with other options, before a model is found or downloaded.

        Args:
            options: the values of the engine's options by their names, and those of plugins that are set.

        Raises:
            ConfigError: a value cannot be combined; the message contains both options and the next step.
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


def variable(option: str) -> str:
    """Return the environment variable of an option, which is named by its field or flag."""
    return ENV_PREFIX + option.replace("-", "_").upper()


def variables_set() -> list[str]:
    """Return the names of all environment variables with our prefix, known or not."""
    return [name for name in os.environ if name.startswith(ENV_PREFIX)]


def _error_text(error: ErrorDetails, given: Mapping[str, Any]) -> str:
    location = error["loc"]
    if not location:  # the error concerns several options together
        return validation_message(error)
    name = ".".join(map(str, location))
    return f"{name}{_source(str(location[0]), given)}: {validation_message(error)} (got {error['input']!r})"


def _source(option: str, given: Mapping[str, Any]) -> str:
    if option in given:
        return ""
    own = variable(option)
    return f" (from {own if own in os.environ else VLLM_VARIABLES.get(option, own)})"
