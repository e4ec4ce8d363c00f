"""Read options of a command from a YAML file: `--config FILE`, for commands of the class `ConfigFileCommand`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import click

from ..errors import ConfigError
from .folders import warn_if_accessible

if TYPE_CHECKING:
    import yaml

Value: TypeAlias = "str | list[str] | dict[str, str]"

SECRETS = ("key", "token", "password", "secret")
"""Last words of flags whose values must be kept secret from other users of the machine."""

_OPENING = {"[": "]", "{": "}", "'": "'", '"': '"'}

_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


LOCATIONS_KEY = f"{__name__}.locations"
"""Key in a context's `meta` of the file locations of options: option name -> file and line."""


class FileOption(click.Option):
    """An option that accepts more than a string in a file.

    Args:
        file_type: the other type that it accepts: a list, whose items are joined by commas, or a mapping, converted to
            JSON.
    """

    def __init__(self, *args: Any, file_type: type[list[str] | dict[str, str]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.file_type = file_type


class EngineOption(FileOption):
    """An option of the engine, shared by many commands. `--help` lists it after the command's own options.

    Args:
        plugin: the title of the plugin that registers it; empty for options of EngineConfig.
    """

    def __init__(self, *args: Any, plugin: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plugin = plugin


class FileSetting(NamedTuple):
    """An option that a file sets.

    Attributes:
        option: the option.
        key: its name as written in the file.
        value: its value, unconverted.
        location: the file and line.
    """

    option: click.Option
    key: str
    value: Value
    location: str


class ConfigFileCommand(click.Command):
    """A command whose options can also be set in a YAML file, by their long names, with dashes or underscores.

    The command line overrides the file, and the file overrides the environment. A list sets an option several times.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # the arguments of click.command()
        self.params.append(_CONFIG)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Raise ConfigError for an invalid file, and click's UsageError for a value that an option rejects."""
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        file = given.get("config_file")
        if not isinstance(file, str) or ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        found = read_options(Path(file), self)
        settings = {setting.option.name: setting for setting in found if setting.option.name not in given}
        file_args = [word for setting in settings.values() for word in _command_line(setting)]
        ctx.meta[LOCATIONS_KEY] = {name: setting.location for name, setting in settings.items()}
        try:
            remaining = super().parse_args(ctx, [*file_args, *args])
        except click.BadParameter as error:
            if error.param and error.param.name in settings:
                location = settings[error.param.name].location
                raise click.BadParameter(f"{error.message} It is set in {location}.", error.ctx, error.param) from error
            raise
        _warn_if_readable(Path(file), found)
        return remaining

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own: list[tuple[str, str]] = []
        shared: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            record = None if isinstance(param, click.Argument) else param.get_help_record(ctx)
            if record is not None:
                (shared if isinstance(param, EngineOption) else own).append(record)
        for title, records in (("Options", own), ("Engine options", shared)):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


_CONFIG = click.Option(
    ["--config", "config_file"],
    type=click.Path(),
    expose_value=False,
    metavar="FILE",
    help="YAML file with any of these options, by their long names. The command line overrides the file, and the file"
    " overrides the environment.",
)


def read_options(path: Path, command: click.Command) -> list[FileSetting]:
    """Return the options of `command` that a file sets, with unconverted values.

    Raises:
        ConfigError: the file cannot be read, is not a mapping in YAML, or has an unknown key; the message contains the
            line, and the closest known option.
    """
    known = dict(_keys(command))
    settings: dict[click.Option, FileSetting] = {}
    for name, location, value in _entries(path):
        option = known.get(name.replace("_", "-"))
        if option is None:
            raise ConfigError(f"{location}: unknown option {name!r}. {_suggestion(name, known)}", param=name)
        if option in settings:
            raise ConfigError(f"{location}: {name!r} is set twice. Remove one of the two.", param=name)
        settings[option] = FileSetting(option, name, value, location)
    return list(settings.values())


def command_line(command: click.Command, values: Mapping[str, object]) -> list[str]:
    """Convert options in a mapping, such as parsed JSON, to command line arguments.

    Args:
        command: a command with these options.
        values: option name, with dashes or underscores -> a string, number or boolean, a list or a mapping of them.

    Raises:
        ConfigError: an option is unknown, or does not accept a list or a mapping; the message contains its name.
    """
    known = {**dict(_keys(command)), "config": _CONFIG}
    words: list[str] = []
    for name, value in values.items():
        option = known.get(name.replace("_", "-"))
        if option is None:
            raise ConfigError(f"Unknown option {name!r}. {_suggestion(name, known)}", param=name)
        words += _command_line(FileSetting(option, name, _as_text(value), "The arguments"))
    return words


def _as_text(value: object) -> Value:
    """Convert a value to the text that a YAML file would have."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return {str(key): str(item) for key, item in value.items()}
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else str(value)


def option_location(name: str | None) -> str | None:
    """Return the file and line that set an option of the running command; None if no file sets it."""
    context = click.get_current_context(silent=True)
    return context.meta.get(LOCATIONS_KEY, {}).get(name) if context else None


def _keys(command: click.Command) -> Iterator[tuple[str, click.Option]]:
    for option in command.params:
        if isinstance(option, click.Option) and option is not _CONFIG:
            yield from ((flag[2:], option) for flag in option.opts if flag.startswith("--"))


def _entries(path: Path) -> Iterator[tuple[str, str, Value]]:
    """Yield key, location and value of each entry. Values stay strings: the option converts them, not YAML."""
    import yaml

    root = _parse(path)
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path} must contain a mapping of option names to values, such as `port: 8000`.")
    for key, node in root.value:
        location = f"{path}, line {key.start_mark.line + 1}"
        name = _text(key, f"{location}: the name of an option")
        yield name, location, _value(node, f"{location}: {name!r}")


def _parse(path: Path) -> yaml.Node | None:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Check the path given with `--config`.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read: it is not UTF-8 text.") from error
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax_error(path, text, error)) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} contains characters that YAML does not allow. Save it as plain text.") from error


def _syntax_error(path: Path, text: str, error: yaml.MarkedYAMLError) -> str:
    """Describe a syntax error and its fix: a tab, an unclosed bracket or quote, or anything else."""
    mark, begin = error.problem_mark or error.context_mark, error.context_mark
    assert mark
    line = f"{path}, line {mark.line + 1}"
    if text[mark.index : mark.index + 1] == "\t":
        return f"{line}: YAML does not allow tabs here. Use spaces."
    if begin and not text[mark.index :].strip() and text[begin.index : begin.index + 1] in _OPENING:
        opening = text[begin.index]
        return f"{path}, line {begin.line + 1}: the `{opening}` is not closed. Add `{_OPENING[opening]}`."
    return f"{line}: invalid YAML. Write `name: value`, and quote a value that contains `: ` or ` #`."


def _value(node: yaml.Node, location: str) -> Value:
    import yaml

    _check_tag(node, location)
    if isinstance(node, yaml.SequenceNode):
        return [_text(item, location) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {_text(key, location): _text(item, location) for key, item in node.value}
    return _text(node, location)


def _text(node: yaml.Node, location: str) -> str:
    import yaml

    _check_tag(node, location)
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigError(f"{location} is nested too deeply. Write a value, or a list of values.")
    if node.tag == "tag:yaml.org,2002:null":
        raise ConfigError(f"{location} has no value. Write one, or remove the line.")
    return str(node.value)


def _check_tag(node: yaml.Node, location: str) -> None:
    import yaml

    if node.tag not in yaml.SafeLoader.yaml_constructors:
        raise ConfigError(f"{location} has the tag {node.tag}. Remove it: tags are not supported.")


def _command_line(setting: FileSetting) -> list[str]:
    """Convert a setting to command line arguments."""
    option, value = setting.option, setting.value
    flag = _flag(option)
    if option.is_flag:
        return _boolean_flag(setting)
    file_type = list if option.multiple else getattr(option, "file_type", None)
    if not isinstance(value, str) and not isinstance(value, file_type or str):
        kind = "a list" if isinstance(value, list) else "a mapping"
        raise ConfigError(f"{setting.location}: {setting.key!r} accepts a single value, not {kind}.", param=setting.key)
    if isinstance(value, dict):
        value = json.dumps(value)
    if isinstance(value, list):
        return [f"{flag}={item}" for item in value] if option.multiple else [f"{flag}={','.join(value)}"]
    return [f"{flag}={value}"]


def _flag(option: click.Option) -> str:
    return next(flag for flag in option.opts if flag.startswith("--"))


def _boolean_flag(setting: FileSetting) -> list[str]:
    value = setting.value
    enabled = _BOOLEANS.get(value.lower()) if isinstance(value, str) else None
    if enabled is None:
        raise ConfigError(f"{setting.location}: {setting.key!r} must be true or false.", param=setting.key)
    return [_flag(setting.option)] if enabled else setting.option.secondary_opts[:1]


def _suggestion(name: str, known: Mapping[str, click.Option]) -> str:
    visible = [key for key, option in known.items() if not option.hidden]
    close = difflib.get_close_matches(name.replace("_", "-"), visible, n=1)
    return f"Did you mean {close[0]!r}?" if close else "`--help` lists all options."


def _warn_if_readable(path: Path, settings: Iterable[FileSetting]) -> None:
    flags = [_flag(setting.option) for setting in settings]
    secret = next((flag for flag in flags if flag.split("-")[-1] in SECRETS), None)
    if secret:
        warn_if_accessible(path, f"`{secret}`")
