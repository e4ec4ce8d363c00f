"""The class of commands that load a model: the options of the engine, and `--config FILE`."""

from __future__ import annotations

import difflib
import functools
import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import click
from click.core import ParameterSource

from ..config import ENV_PREFIX, EngineConfig, variable, variables_set
from ..config.vllm_arguments import vllm_hint
from ..plugins import ALLOWED_VARIABLE, options_registry
from .config_file import CONFIG_FILE, FileOption, located_errors, option_location, warn_if_readable
from .options import MODEL_ARGUMENT, EngineOption, engine_options

logger: logging.Logger = logging.getLogger(__name__)

ENVIRONMENT = (
    f"Engine options can also be set by environment variables, such as {ENV_PREFIX}MAX_PIXELS for --max-pixels."
)

HELP_COMMAND = "`dashinfer-vlm serve --help`"

_KUBERNETES = re.compile(r"(.+_)?(SERVICE_(HOST|PORT(_.+)?)|PORT(_\d+_.+)?)")
"""Rest of the variables that Kubernetes sets for Services whose names begin with our prefix."""


class EngineCommand(click.Command):
    """A command that has the options of EngineConfig and of plugins, and receives them as the parameter `config`.

    All its options can also be set in a YAML file, by their long names. `--help` lists them by section, in the order of
    their declaration after `first_sections`. Variables with our prefix that set nothing are logged.

    Attributes:
        first_sections: titles of sections of the help.

    Raises, when the command runs:
        ConfigError: a value is out of range, or the file is invalid; the message contains the name of the option.
    """

    first_sections: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"epilog": ENVIRONMENT, **kwargs})

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
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if not (hint := self._vllm_hint(error.option_name)):
                raise
            message = f"No such option '{error.option_name}'. {hint}"
            raise click.NoSuchOption(error.option_name, message, ctx=ctx) from None
        except click.BadParameter as error:
            location = option_location(error.param.name if error.param else None)
            if location is None:
                raise
            raise click.BadParameter(f"{error.message} It is set in {location}.", error.ctx, error.param) from error
        self.use_model_argument(ctx)
        return rest

    def _vllm_hint(self, flag: str) -> str:
        """Return what to use instead of a flag of vLLM; empty if it has none of this name."""
        name = flag.lstrip("-").replace("-", "_")
        negated = name.startswith("no_")
        flags = {each.name: ((negated and each.secondary_opts) or each.opts)[0] for each in self.engine_options}
        hint = vllm_hint(name.removeprefix("no_"))
        return re.sub(r"`(\w+)`", lambda option: f"`{flags.get(option[1], option[1])}`", hint)

    def use_model_argument(self, ctx: click.Context) -> None:
        """Make MODEL, if the command has this argument and it is given, the value of `--model`."""
        model = None if ctx.resilient_parsing else ctx.params.pop(MODEL_ARGUMENT, None)
        if model is None:
            return
        option = ctx.params["model"]
        is_repeatable = isinstance(option, tuple)
        value = (model,) if is_repeatable else model
        if ctx.get_parameter_source("model") is ParameterSource.COMMANDLINE and option != value:
            shown = " and ".join(map(repr, option)) if is_repeatable else repr(option)
            raise click.UsageError(f"MODEL is {model!r}, but --model is {shown}. Leave out one of the two.", ctx)
        ctx.params["model"] = value
        ctx.set_parameter_source("model", ParameterSource.COMMANDLINE)

    def invoke(self, ctx: click.Context) -> Any:
        names = {option.name for option in self.engine_options if option.name}
        warn_if_readable(ctx)
        for line in unknown_variables(variables_set(), ctx, names):
            logger.warning(line)
        given = {name: value for name, value in ctx.params.items() if name in names and value not in (None, ())}
        own = {name: value for name, value in ctx.params.items() if name not in names}
        assert self.callback
        with located_errors():
            return ctx.invoke(self.callback, **own, config=_config(given))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in self.first_sections}
        for param in self.get_params(ctx):
            title = param.section if isinstance(param, FileOption) else "Options"
            record = None if isinstance(param, click.Argument) else param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def _config(given: dict[str, Any]) -> EngineConfig:
    config = EngineConfig(**given)
    options_registry().resolve_options(config)  # an invalid value is reported here, before a model is loaded
    return config


def unknown_variables(names: Iterable[str], context: click.Context, options: Iterable[str]) -> Iterator[str]:
    """Yield a warning for each name with our prefix that is not a variable of an engine option or any command.

    A command that is not run from a group does not know the variables of other commands: there are no warnings then.

    Args:
        names: the variables that are set.
        context: of the running command.
        options: the names of the engine options.
    """
    group = context.find_root().command
    known = {ALLOWED_VARIABLE, *map(variable, options)}
    unknown = sorted(name for name in names if _has_prefix(name) and name not in known)
    if not unknown or not isinstance(group, click.Group):
        return
    known.update(_variables(group, context.find_root()), _variables(context.command, context))
    words = [name.removeprefix(ENV_PREFIX) for name in known]
    for name in unknown:
        if name not in known:
            close = difflib.get_close_matches(name.removeprefix(ENV_PREFIX), words, n=1)
            fix = f"Did you mean {ENV_PREFIX}{close[0]}?" if close else f"{HELP_COMMAND} lists all options."
            yield f"The environment variable {name} does not set any option. {fix}"


def _has_prefix(name: str) -> bool:
    return name.startswith(ENV_PREFIX) and not _KUBERNETES.fullmatch(name.removeprefix(ENV_PREFIX))


def _variables(command: click.Command, context: click.Context) -> Iterator[str]:
    for param in command.params:
        yield from (param.envvar,) if isinstance(param.envvar, str) else param.envvar or ()
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            if subcommand := command.get_command(context, name):
                yield from _variables(subcommand, context)
