"""EngineConfig on the command line: one option per field, made from the fields themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click

from .config import ENV_PREFIX, EngineConfig

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

Command = Callable[..., Any]

ENVIRONMENT = f"The environment sets the same options: {ENV_PREFIX}MAX_PIXELS for --max-pixels, and so on."


def config_options(command: Command) -> Command:
    """Decorate a click command: it gets options for all fields of EngineConfig, and a parameter `config` made of them.

    Its help also says how the environment sets them.

    Raises, when the command runs:
        ConfigError: a value is out of range; the message names the option.
    """

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = {name: kwargs.pop(name) for name in EngineConfig.model_fields}
        config = EngineConfig(**{name: value for name, value in given.items() if value is not None})
        return command(*args, config=config, **kwargs)

    run.__doc__ = f"{command.__doc__}\n\n    {ENVIRONMENT}"
    decorated: Command = run
    for name, field in reversed(EngineConfig.model_fields.items()):
        decorated = _option(name, field)(decorated)
    return decorated


def _option(name: str, field: FieldInfo) -> Callable[[Command], Command]:
    flag = name.replace("_", "-")
    text = f"{field.description} [default: {_shown(field.default)}]"
    if field.annotation is bool:
        return click.option(f"--{flag}/--no-{flag}", name, default=None, help=text)
    # Values stay text here: EngineConfig alone converts and checks them, for every way in.
    return click.option(f"--{flag}", name, default=None, metavar=_metavar(field.annotation), help=text)


def _shown(default: object) -> str:
    if default is None or default == ():
        return "none"
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return str(default)


def _metavar(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return f"[{'|'.join(get_args(annotation))}]"
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None) and kind is not Ellipsis]
    kind = kinds[0]
    name = {int: "INT", float: "NUMBER", Path: "PATH"}.get(kind, "TEXT")
    return ",".join([name] * len(kinds)) if get_origin(annotation) is tuple and len(kinds) > 1 else name
