"""The class of commands that load a model: the options of the engine, and `--config FILE`."""

from __future__ import annotations

import functools
import logging
from typing import Any

import click

from ..config import ENV_PREFIX, EngineConfig, variables_set
from ..errors import ConfigError
from ..plugins import options_registry
from .config_file import CONFIG_FILE, FileOption, option_location, warn_if_readable
from .env_check import unknown_variables
from .options import EngineOption, engine_options

logger: logging.Logger = logging.getLogger(__name__)

ENVIRONMENT = (
    f"Engine options can also be set by environment variables, such as {ENV_PREFIX}MAX_PIXELS for --max-pixels."
)


class EngineCommand(click.Command):
    """A command that has the options of EngineConfig and of plugins, and receives them as the parameter `config`.

    All its options can also be set in a YAML file, by their long names. `--help` lists them by section, in the order of
    their declaration. Variables with our prefix that set nothing are logged.

    Raises, when the command runs:
        ConfigError: a value is out of range, or the file is invalid; the message contains the name of the option.
    """

    @functools.cached_property
    def engine_options(self) -> list[EngineOption]:
        """Created when they are first needed: a plugin that defines a command is imported before its options exist."""
        return engine_options()

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        own = super().get_params(ctx)
        count = len(self.params)
        return [*own[:count], *self.engine_options, CONFIG_FILE, *own[count:]]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            location = option_location(error.param.name if error.param else None)
            if location is None:
                raise
            raise click.BadParameter(f"{error.message} It is set in {location}.", error.ctx, error.param) from error

    def invoke(self, ctx: click.Context) -> Any:
        names = {option.name for option in self.engine_options if option.name}
        warn_if_readable(ctx)
        for line in unknown_variables(variables_set(), ctx, names):
            logger.warning(line)
        given = {name: value for name, value in ctx.params.items() if name in names and value not in (None, ())}
        own = {name: value for name, value in ctx.params.items() if name not in names}
        assert self.callback
        return ctx.invoke(self.callback, **own, config=_config(given))

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_help_text(ctx, formatter)
        if ENV_PREFIX not in (self.help or ""):
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(ENVIRONMENT)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            title = param.section if isinstance(param, FileOption) else "Options"
            record = None if isinstance(param, click.Argument) else param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def _config(given: dict[str, Any]) -> EngineConfig:
    try:
        config = EngineConfig(**given)
        options_registry().resolve_options(config)  # an invalid value is reported here, before a model is loaded
    except ConfigError as error:
        location = option_location(error.param)
        raise ConfigError(f"{location}: {error.message}" if location else error.message, param=error.param) from None
    return config
