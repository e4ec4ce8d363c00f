"""Variables of the environment that look like options, and are none: most are misspelt."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator

import click

from .engine_config import option_fields, variable
from .plugin_options import ENV_PREFIX

SHOWN = "`dashinfer-vlm serve --help`"

_KUBERNETES = re.compile(r"(.+_)?(SERVICE_(HOST|PORT(_.+)?)|PORT(_\d+_.+)?)")
"""What stands behind the prefix in the variables that Kubernetes sets for Services whose names begin so."""


def unknown_variables(names: Iterable[str], context: click.Context) -> Iterator[str]:
    """A line for each of the names that begins as our variables do, and is one of no command of the program.

    A command that is not run from a group does not know the others' variables: nothing is said then.
    """
    group = context.find_root().command
    known = {variable(name) for name in option_fields()}
    unknown = sorted(name for name in names if _ours(name) and name not in known)
    if not unknown or not isinstance(group, click.Group):
        return
    known.update(_variables(group, context.find_root()), _variables(context.command, context))
    words = [name.removeprefix(ENV_PREFIX) for name in known]
    for name in unknown:
        if name not in known:
            near = difflib.get_close_matches(name.removeprefix(ENV_PREFIX), words, n=1)
            fix = f"Did you mean {ENV_PREFIX}{near[0]}?" if near else f"{SHOWN} lists those that do."
            yield f"{name} is set in the environment, and sets no option. {fix}"


def _ours(name: str) -> bool:
    return name.startswith(ENV_PREFIX) and not _KUBERNETES.fullmatch(name.removeprefix(ENV_PREFIX))


def _variables(command: click.Command, context: click.Context) -> Iterator[str]:
    """Of a command and of those below it, as far as they are loaded."""
    for param in command.params:
        yield from (param.envvar,) if isinstance(param.envvar, str) else param.envvar or ()
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            if below := command.get_command(context, name):
                yield from _variables(below, context)
