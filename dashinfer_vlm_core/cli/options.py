"""EngineConfig on the command line: one option per field, generated from the fields."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click
from click.shell_completion import CompletionItem

from ..config import ENV_PREFIX, MIB, EngineConfig, MediaLimits, option_fields, variables_set
from ..config.config_file import EngineOption, option_location
from ..config.env_check import unknown_variables
from ..errors import ConfigError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

logger: logging.Logger = logging.getLogger(__name__)

Command = Callable[..., Any]

REPEATABLE = {"lora"}
"""Options that are given once for each value, which may contain commas."""

METAVARS = {
    "lora": "NAME=FOLDER",
    "model": "NAME|FOLDER",
    "allowed_media_domains": "NAME,...",
    "embedding_store": "URL",
    "limit_mm_per_prompt": "image=N,video=N",
    "rgba_background": "R,G,B",
}
"""Placeholders for values in the help, for options whose type and unit do not determine them."""

UNITS = {"mib": "MIB", "bytes": "BYTES", "pixels": "PIXELS", "patches": "PATCHES", "seconds": "SECONDS",
         "timeout": "SECONDS", "ttl": "SECONDS", "frames": "FRAMES"}  # fmt: skip
"""Placeholders by the last word of a field's name, for fields with a unit."""

ENVIRONMENT = (
    f"Engine options can also be set by environment variables, such as {ENV_PREFIX}MAX_PIXELS for --max-pixels."
)


def config_options(command: Command) -> Command:
    """Add the options of EngineConfig and of plugins to a click command, which receives them as the parameter `config`.

    The help also describes the environment variables, unless the command's docstring does. Variables with our prefix
    that set nothing are logged.

    Raises, when the command runs:
        ConfigError: a value is out of range; the message contains the name of the option.
    """

    fields = option_fields()

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        for line in unknown_variables(variables_set(), click.get_current_context()):
            logger.warning(line)
        given = {name: kwargs.pop(name) for name in fields}
        config = _config({name: value for name, value in given.items() if value not in (None, ())})
        return command(*args, config=config, **kwargs)

    if ENV_PREFIX not in (command.__doc__ or ""):
        run.__doc__ = f"{command.__doc__}\n\n    {ENVIRONMENT}"
    decorated: Command = run
    for name, (field, plugin) in reversed(fields.items()):
        decorated = _option(name, field, plugin)(decorated)
    return decorated


def _config(given: dict[str, Any]) -> EngineConfig:
    try:
        return EngineConfig(**given)
    except ConfigError as error:
        location = option_location(error.param)
        raise ConfigError(f"{location}: {error.message}" if location else error.message, param=error.param) from None


def _option(name: str, field: FieldInfo, plugin: str) -> Callable[[Command], Command]:
    flag = name.replace("_", "-")
    default = _default_text(name, field.default)
    text = f"{field.description}  [default: {default}]" if default else field.description
    if _member_types(field.annotation) == [bool]:
        return click.option(f"--{flag}/--no-{flag}", name, cls=EngineOption, plugin=plugin, default=None, help=text)
    # Values stay strings here: only EngineConfig converts and validates them, whatever their source.
    return click.option(
        f"--{flag}",
        name,
        cls=EngineOption,
        plugin=plugin,
        default=None,
        multiple=name in REPEATABLE,
        metavar=_metavar(name, field.annotation),
        file_type=dict if field.annotation is MediaLimits else list if get_origin(field.annotation) is tuple else None,
        help=text,
        shell_complete=functools.partial(_complete, name, field.annotation),
    )


def _complete(
    name: str, annotation: Any, _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return shell completions for an incomplete value: models, the choices of a type, or files."""
    words = model_names() if name == "model" else _choices(annotation)
    found = [CompletionItem(word) for word in words if word.startswith(incomplete)]
    return found or (
        [CompletionItem(incomplete, type="file")] if name == "model" or _member_types(annotation)[0] is Path else []
    )


def model_names() -> list[str]:
    """Return the models that need no download: registered ones, and those in the Hugging Face cache."""
    from ..models.checkpoint import cached_models
    from ..plugins import load_plugins

    return [*sorted(load_plugins().models), *sorted(cached_models())]


def _choices(annotation: Any) -> tuple[str, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _default_text(name: str, default: object) -> str:
    """Format a default for the help; empty if the description states the default."""
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
    if words := _choices(annotation):
        return f"[{'|'.join(words)}]"
    if known := METAVARS.get(name) or UNITS.get(name.rsplit("_", maxsplit=1)[-1]):
        return known
    return {int: "INT", float: "NUMBER", Path: "PATH"}.get(_member_types(annotation)[0], "NAME")


def _member_types(annotation: Any) -> list[Any]:
    return [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None) and kind is not Ellipsis]
