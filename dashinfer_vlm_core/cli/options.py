"""EngineConfig on the command line: one option per field, made from the fields themselves."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click
from click.shell_completion import CompletionItem

from ..config import ENV_PREFIX, MIB, EngineConfig, MediaLimits, option_fields, variables_set
from ..config.config_file import EngineOption, place_of
from ..config.env_check import unknown_variables
from ..errors import ConfigError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

logger: logging.Logger = logging.getLogger(__name__)

Command = Callable[..., Any]

METAVARS = {
    "model": "NAME|FOLDER",
    "allowed_media_domains": "NAME,...",
    "limit_mm_per_prompt": "image=N,video=N",
    "rgba_background": "R,G,B",
}
"""What stands for a value in the help, where its type and unit do not say it."""

UNITS = {"mib": "MIB", "bytes": "BYTES", "pixels": "PIXELS", "patches": "PATCHES", "seconds": "SECONDS",
         "timeout": "SECONDS", "frames": "FRAMES"}  # fmt: skip
"""Last words of fields that have a unit."""

ENVIRONMENT = f"The environment sets options of the engine: {ENV_PREFIX}MAX_PIXELS for --max-pixels, and so on."


def config_options(command: Command) -> Command:
    """Decorate a click command: it gets options for all fields of EngineConfig and those that plugins bring, and a
    parameter `config` made of them.

    Its help also says how the environment sets them; variables that look like them and set nothing are logged.

    Raises, when the command runs:
        ConfigError: a value is out of range; the message names the option.
    """

    fields = option_fields()

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        for line in unknown_variables(variables_set(), click.get_current_context()):
            logger.warning(line)
        given = {name: kwargs.pop(name) for name in fields}
        config = _config({name: value for name, value in given.items() if value is not None})
        return command(*args, config=config, **kwargs)

    run.__doc__ = f"{command.__doc__}\n\n    {ENVIRONMENT}"
    decorated: Command = run
    for name, (field, plugin) in reversed(fields.items()):
        decorated = _option(name, field, plugin)(decorated)
    return decorated


def _config(given: dict[str, Any]) -> EngineConfig:
    try:
        return EngineConfig(**given)
    except ConfigError as error:
        place = place_of(error.param)
        raise ConfigError(f"{place}: {error.message}" if place else error.message, param=error.param) from None


def _option(name: str, field: FieldInfo, plugin: str) -> Callable[[Command], Command]:
    flag = name.replace("_", "-")
    default = _shown(name, field.default)
    text = f"{field.description}  [default: {default}]" if default else field.description
    if field.annotation is bool:
        return click.option(f"--{flag}/--no-{flag}", name, cls=EngineOption, plugin=plugin, default=None, help=text)
    # Values stay text here: EngineConfig alone converts and checks them, for every way in.
    return click.option(
        f"--{flag}",
        name,
        cls=EngineOption,
        plugin=plugin,
        default=None,
        metavar=_metavar(name, field.annotation),
        also=dict if field.annotation is MediaLimits else list if get_origin(field.annotation) is tuple else None,
        help=text,
        shell_complete=functools.partial(_complete, name, field.annotation),
    )


def _complete(
    name: str, annotation: Any, _ctx: click.Context, _param: click.Parameter, begun: str
) -> list[CompletionItem]:
    """What a shell offers for a value that was begun: models, the words that a type knows, or files."""
    words = model_names() if name == "model" else _words(annotation)
    found = [CompletionItem(word) for word in words if word.startswith(begun)]
    return found or ([CompletionItem(begun, type="file")] if name == "model" or _kinds(annotation)[0] is Path else [])


def model_names() -> list[str]:
    """Models that need no download: the registered ones, and those in the hub's cache."""
    from ..models.checkpoint import downloaded
    from ..plugins import load_plugins

    return [*sorted(load_plugins().models), *sorted(downloaded())]


def _words(annotation: Any) -> tuple[str, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _shown(name: str, default: object) -> str:
    """A default for the help; empty where the description says what happens without a value."""
    if default is None or default == ():
        return ""
    if isinstance(default, bool):
        return name.replace("_", "-") if default else f"no-{name.replace('_', '-')}"
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    if isinstance(default, int) and name.endswith("_bytes"):
        return f"{default}, {default // MIB} MiB"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _metavar(name: str, annotation: Any) -> str:
    if words := _words(annotation):
        return f"[{'|'.join(words)}]"
    if known := METAVARS.get(name) or UNITS.get(name.rsplit("_", maxsplit=1)[-1]):
        return known
    return {int: "INT", float: "NUMBER", Path: "PATH"}.get(_kinds(annotation)[0], "NAME")


def _kinds(annotation: Any) -> list[Any]:
    return [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None) and kind is not Ellipsis]
