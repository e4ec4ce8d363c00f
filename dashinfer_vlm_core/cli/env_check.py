"""Detect environment variables with our prefix that set no option; most are misspelled."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator

import click

from ..config import ENV_PREFIX, variable
from ..plugins import ALLOWED_VARIABLE

HELP_COMMAND = "`dashinfer-vlm serve --help`"

_KUBERNETES = re.compile(r"(.+_)?(SERVICE_(HOST|PORT(_.+)?)|PORT(_\d+_.+)?)")
"""Rest of the variables that Kubernetes sets for Services whose names begin with our prefix."""


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
    """Yield the variables of a command and its subcommands, as far as they are loaded."""
    for param in command.params:
        yield from (param.envvar,) if isinstance(param.envvar, str) else param.envvar or ()
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            if subcommand := command.get_command(context, name):
                yield from _variables(subcommand, context)
