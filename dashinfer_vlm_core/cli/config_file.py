"""`--config FILE`: a YAML file that sets options of a command, which becomes click's `default_map`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import click
import yaml
from click.core import ParameterSource

from ..config.folders import warn_if_accessible
from ..config.vllm_arguments import option_hint
from ..errors import ConfigError

Value: TypeAlias = "str | list[str]"

SECRETS = ("key", "token", "password", "secret")
"""Last words of flags whose values must be kept secret from other users of the machine."""

MAX_DEPTH = 3
"""Nesting of the value of an option with `nested`: options of a model that are mappings."""

_LOCATIONS = f"{__name__}.locations"
"""Key in a context's `meta` of the file and line that set an option, by its path, such as `models.chat.decoder`."""

_SECRET = f"{__name__}.secret"
"""Key in a context's `meta` of the file and the flag of a secret that it sets."""


class FileOption(click.Option):
    """An option with environment variables, which `--config FILE` overrides as it does the engine's.

    Args:
        section: title of its section of the help.

    Attributes:
        nested: whether its value in a file can contain mappings in mappings.
    """

    nested: bool = False

    def __init__(self, *args: Any, section: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        return None if self.name in (ctx.default_map or {}) else super().resolve_envvar_value(ctx)


def option_values(command: click.Command, values: Mapping[str, Any]) -> dict[str, Value]:
    """Convert options in a mapping, such as parsed JSON, to a `default_map` for the command.

    Args:
        command: a command with these options.
        values: option name, with dashes or underscores -> a string, number or boolean, a list or a mapping of them.

    Raises:
        ConfigError: an option is unknown; the message contains its name.
    """
    known = {**_options(command, click.Context(command)), "config": CONFIG_FILE}
    return dict(_setting(known, name, value) for name, value in values.items())


def option_location(name: str | None) -> str | None:
    """Return the file and line that set an option of the running command; None if no file sets it.

    Args:
        name: the option, or its path in the value of one, such as `models.chat.decoder`.
    """
    context = click.get_current_context()
    option = name and name.partition(".")[0]
    is_in_file = option and context.get_parameter_source(option) is ParameterSource.DEFAULT_MAP
    return context.meta.get(_LOCATIONS, {}).get(name) if is_in_file else None


@contextlib.contextmanager
def located_errors() -> Iterator[None]:
    """Add the file and line that set the option to a ConfigError."""
    try:
        yield
    except ConfigError as error:
        if location := option_location(error.param):
            raise ConfigError(f"{location}: {error.message}", param=error.param) from None
        raise


def warn_if_readable(context: click.Context) -> None:
    """Warn if the file of a command sets a secret and all users can access it, after the options of logs are parsed."""
    path, secret = context.meta.get(_SECRET, (None, ""))
    if path:
        warn_if_accessible(path, f"`{secret}`")


def _read(context: click.Context, option: click.Parameter, path: Path | None) -> None:
    if path is None or context.resilient_parsing:
        return
    known = _options(context.command, context)
    settings: dict[str, Value] = {}
    locations: dict[str, str] = {}
    for key, location, given, lines in _entries(path, known):
        try:
            name, value = _setting(known, key, given)
        except ConfigError as error:
            raise ConfigError(f"{location}: {error.message}", param=error.param) from None
        if name in settings:
            raise ConfigError(f"{location}: {key!r} is set twice. Remove one of the two.", param=key)
        settings[name] = value
        locations |= {name: location, **{f"{name}.{inner}": line for inner, line in lines.items()}}
    context.default_map = {**settings, **(context.default_map or {})}
    context.meta[_LOCATIONS] = locations
    flags = (flag for flag, option in known.items() if option.name in settings)
    if secret := next((flag for flag in flags if flag.split("-")[-1] in SECRETS), None):
        context.meta[_SECRET] = path, f"--{secret}"


CONFIG_FILE = click.Option(
    ["--config", "config_file"],
    type=click.Path(path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=_read,
    metavar="FILE",
    help="YAML file with any of these options, by their long names. The command line overrides the file, and the file"
    " overrides the environment.",
)


def _options(command: click.Command, context: click.Context) -> dict[str, click.Option]:
    # Without those that act by themselves, such as `--help`.
    params = command.get_params(context)
    options = (param for param in params if isinstance(param, click.Option) and param.expose_value)
    return {flag[2:]: option for option in options for flag in option.opts if flag.startswith("--")}


def _setting(known: Mapping[str, click.Option], key: str, value: Any) -> tuple[str, Value]:
    option = known.get(key.replace("_", "-"))
    if option is None or option.name is None:
        visible = [flag for flag, option in known.items() if not option.hidden]
        hint = option_hint(key.replace("_", "-"), visible) or "`--help` lists all options."
        raise ConfigError(f"Unknown option {key!r}. {hint}", param=key)
    if isinstance(value, Mapping):
        return option.name, json.dumps(value)
    texts = list(map(str, value)) if isinstance(value, (list, tuple)) else [str(value)]
    return option.name, texts if option.multiple else ",".join(texts)


def _entries(path: Path, known: Mapping[str, click.Option]) -> Iterator[tuple[str, str, Any, dict[str, str]]]:
    """Yield key, location and value of each entry, and the locations of the keys in it, by their paths.

    Values stay strings: the option converts them, not YAML.
    """
    root = _parse(path)
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path} must contain a mapping of option names to values, such as `port: 8000`.")
    for key, node in root.value:
        location = _location(key, path)
        name = _text(key, f"{location}: the name of an option")
        option = known.get(name.replace("_", "-"))
        depth = MAX_DEPTH if isinstance(option, FileOption) and option.nested else 1
        yield name, location, _Value(path, name, location).read(node, depth), dict(_lines(node, path))


def _parse(path: Path) -> yaml.Node | None:
    try:
        return yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Check the path given with `--config`.") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(
            f"{path}{line}: invalid YAML, {error.problem}. Write `name: value`, and quote a value that contains `: ` or"
            " ` #`."
        ) from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: it is not plain UTF-8 text.") from error


@dataclass(frozen=True, slots=True)
class _Value:
    """An option, or an entry of the mapping that is its value.

    Attributes:
        path: the file.
        name: the path of its keys, such as `models.chat.decoder`.
        location: the file and the line of its key.
    """

    path: Path
    name: str
    location: str

    @property
    def _shown(self) -> str:
        return f"{self.location}: {self.name!r}"

    def read(self, node: yaml.Node, depth: int) -> Any:
        if node.tag not in yaml.SafeLoader.yaml_constructors:
            raise ConfigError(f"{self._shown} has the tag {node.tag}. Remove it: tags are not supported.")
        if isinstance(node, yaml.SequenceNode) and depth:
            return [self.read(item, depth - 1) for item in node.value]
        if isinstance(node, yaml.MappingNode) and depth:
            return self._read_mapping(node, depth)
        return _text(node, self._shown)

    def _read_mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, item in node.value:
            location = _location(key, self.path)
            name = _text(key, f"{location}: a key of {self.name!r}")
            entry = _Value(self.path, f"{self.name}.{name}", location)
            if name in values:
                raise ConfigError(f"{entry._shown} is set twice. Remove one of the two.")
            values[name] = entry.read(item, depth - 1)
        return values


def _location(key: yaml.Node, path: Path) -> str:
    return f"{path}, line {key.start_mark.line + 1}"


def _lines(node: yaml.Node, path: Path) -> Iterator[tuple[str, str]]:
    if isinstance(node, yaml.MappingNode):
        for key, item in node.value:
            yield str(key.value), _location(key, path)
            yield from ((f"{key.value}.{inner}", line) for inner, line in _lines(item, path))


def _text(node: yaml.Node, location: str) -> str:
    if node.tag == "tag:yaml.org,2002:null":
        raise ConfigError(f"{location} has no value. Write one, or remove the line.")
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigError(f"{location} is nested too deeply. Write a value, or a list of values.")
    return str(node.value)
