"""Options with a new name: the old one works for one minor version, with a warning that names the new one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import click

from ..deprecation import REMOVED_IN

logger: logging.Logger = logging.getLogger(__name__)

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def renamed_option(old: str, new: str, *, envvar: str | None = None) -> Callable[[CommandT], CommandT]:
    """Decorate a command that has the option `new`: it also accepts `old`, which `--help` does not list.

    If both are given, `new` takes precedence. The option `new` validates the value, so that errors name it.

    Args:
        old: the old flag, such as `--pictures`.
        new: the flag that replaces it, which takes a value and names its parameter, such as `--images`.
        envvar: the environment variable that sets `old`.
    """
    parameter = new.removeprefix("--").replace("-", "_")

    def pass_on(context: click.Context, _option: click.Parameter, value: Any) -> None:
        if value is not None and not context.resilient_parsing:
            logger.warning("`%s` is deprecated and will be removed in %s. Use `%s`.", old, REMOVED_IN, new)
            context.default_map = {**(context.default_map or {}), parameter: value}

    # Eager, so that the default is in place when `new` is processed.
    return click.option(
        old, callback=pass_on, envvar=envvar, expose_value=False, hidden=True, is_eager=True, type=click.UNPROCESSED
    )
