"""Options of a command from a YAML file: `--config FILE`, for every command of the class `ConfiguredCommand`."""

from __future__ import annotations

import difflib
import json
import logging
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import click

from ..errors import ConfigError

if TYPE_CHECKING:
    import yaml

logger: logging.Logger = logging.getLogger(__name__)

Value: TypeAlias = "str | list[str] | dict[str, str]"

SECRETS = ("key", "token", "password", "secret")
"""Last words of the flags of options that other users of the machine should not read."""

_PAIRED = frozenset("[{'\"")

_TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


PLACES = f"{__name__}.places"
"""Where in a context's `meta` it stands from which line of a file an option has its value, by the option's name."""


class FileOption(click.Option):
    """An option that takes more than a text in a file.

    Args:
        also: the type of what it takes: a list, whose items are then joined by commas, or a mapping, as JSON.
    """

    def __init__(self, *args: Any, also: type[list[str] | dict[str, str]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.also = also


class EngineOption(FileOption):
    """An option of the engine, as many commands have it: help lists it behind the command's own.

    Args:
        plugin: the title of the plugin that brings it; empty for the engine's own.
    """

    def __init__(self, *args: Any, plugin: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plugin = plugin


class Setting(NamedTuple):
    """An option that a file sets.

    Attributes:
        option: which.
        key: as the file has it.
        value: as text.
        where: the file and its line.
    """

    option: click.Option
    key: str
    value: Value
    where: str


class ConfiguredCommand(click.Command):
    """A command whose options may also stand in a YAML file, by their long names, with dashes or underscores.

    The file counts as options that are written before those of the command line: it yields to them, and comes before
    the environment. Lists are options given several times.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # what click.command() hands over
        self.params.append(_CONFIG)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Raises ConfigError, and for values that an option refuses click's UsageError."""
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        file = given.get("config_file")
        if not isinstance(file, str) or ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        found = read_options(Path(file), self)
        settings = {setting.option.name: setting for setting in found if setting.option.name not in given}
        written = [word for setting in settings.values() for word in _words(setting)]
        ctx.meta[PLACES] = {name: setting.where for name, setting in settings.items()}
        try:
            left = super().parse_args(ctx, [*written, *args])
        except click.BadParameter as error:
            if error.param and error.param.name in settings:
                where = settings[error.param.name].where
                raise click.BadParameter(f"{error.message} It comes from {where}.", error.ctx, error.param) from error
            raise
        _warn_of_readers(Path(file), found)
        return left

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own: list[tuple[str, str]] = []
        shared: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            record = None if isinstance(param, click.Argument) else param.get_help_record(ctx)
            if record is not None:
                (shared if isinstance(param, EngineOption) else own).append(record)
        for title, records in (("Options", own), ("Options of the engine", shared)):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


_CONFIG = click.Option(
    ["--config", "config_file"],
    type=click.Path(),
    expose_value=False,
    metavar="FILE",
    help="YAML file with any of these options, by their long names. The command line overrides it, and it overrides the"
    " environment.",
)


def read_options(path: Path, command: click.Command) -> list[Setting]:
    """The options of `command` that a file sets, with their values as text.

    Raises:
        ConfigError: the file cannot be read, is no mapping in YAML, or has a key that is no option; the message names
            the line, and the option that may have been meant.
    """
    known = dict(_keys(command))
    found: dict[click.Option, Setting] = {}
    for name, where, value in _pairs(path):
        option = known.get(name.replace("_", "-"))
        if option is None:
            raise ConfigError(f"{where}: there is no option {name!r}. {_nearest(name, known)}", param=name)
        if option in found:
            raise ConfigError(f"{where}: {name!r} is set twice. Keep one of the two.", param=name)
        found[option] = Setting(option, name, value, where)
    return list(found.values())


def place_of(name: str | None) -> str | None:
    """The file and line from which an option of the running command has its value, if it has it from a file."""
    context = click.get_current_context(silent=True)
    return context.meta.get(PLACES, {}).get(name) if context else None


def _keys(command: click.Command) -> Iterator[tuple[str, click.Option]]:
    for option in command.params:
        if isinstance(option, click.Option) and option is not _CONFIG:
            yield from ((flag[2:], option) for flag in option.opts if flag.startswith("--"))


def _pairs(path: Path) -> Iterator[tuple[str, str, Value]]:
    """Key, place and value of each entry. Values stay text: what they mean is for the option to say, not for YAML."""
    import yaml

    root = _parse(path)
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path} has to hold options by their names, such as `port: 8000`.")
    for key, node in root.value:
        where = f"{path}, line {key.start_mark.line + 1}"
        name = _text(key, f"{where}: the name of an option")
        yield name, where, _value(node, f"{where}: {name!r}")


def _parse(path: Path) -> yaml.Node | None:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Check the path (`--config`).") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read: it is no text in UTF-8.") from error
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_explain(path, text, error)) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} has characters that YAML does not allow. Write it anew as plain text.") from error


def _explain(path: Path, text: str, error: yaml.MarkedYAMLError) -> str:
    """Where a file is no YAML, and what to write there: a tab, something without its end, or anything else."""
    mark, begin = error.problem_mark or error.context_mark, error.context_mark
    assert mark
    line = f"{path}, line {mark.line + 1}"
    if text[mark.index : mark.index + 1] == "\t":
        return f"{line}: there is a tab. Write blanks in its place: YAML allows no tabs there."
    if begin and not text[mark.index :].strip() and text[begin.index : begin.index + 1] in _PAIRED:
        return f"{path}, line {begin.line + 1}: {text[begin.index]} has no end. Write the one that closes it."
    return f"{line}: this is no YAML. Write `name: value`, and quotes around a value that has `: ` or ` #` in it."


def _value(node: yaml.Node, where: str) -> Value:
    import yaml

    _check_tag(node, where)
    if isinstance(node, yaml.SequenceNode):
        return [_text(item, where) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {_text(key, where): _text(item, where) for key, item in node.value}
    return _text(node, where)


def _text(node: yaml.Node, where: str) -> str:
    import yaml

    _check_tag(node, where)
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigError(f"{where} is nested too deep: write a value, or a list of them.")
    if node.tag == "tag:yaml.org,2002:null":
        raise ConfigError(f"{where} has no value: write one, or leave the line out.")
    return str(node.value)


def _check_tag(node: yaml.Node, where: str) -> None:
    import yaml

    if node.tag not in yaml.SafeLoader.yaml_constructors:
        raise ConfigError(f"{where} has the tag {node.tag}: write values without tags.")


def _words(setting: Setting) -> list[str]:
    """A value as it would be written on the command line."""
    option, value = setting.option, setting.value
    flag = _flag(option)
    if option.is_flag:
        return _flag_words(setting)
    also = list if option.multiple else getattr(option, "also", None)
    if not isinstance(value, str) and not isinstance(value, also or str):
        kind = "a list" if isinstance(value, list) else "keys of its own"
        raise ConfigError(f"{setting.where}: {setting.key!r} takes one value, not {kind}.", param=setting.key)
    if isinstance(value, dict):
        value = json.dumps(value)
    if isinstance(value, list):
        return [f"{flag}={item}" for item in value] if option.multiple else [f"{flag}={','.join(value)}"]
    return [f"{flag}={value}"]


def _flag(option: click.Option) -> str:
    return next(flag for flag in option.opts if flag.startswith("--"))


def _flag_words(setting: Setting) -> list[str]:
    value = setting.value
    wanted = _TRUTHS.get(value.lower()) if isinstance(value, str) else None
    if wanted is None:
        raise ConfigError(f"{setting.where}: {setting.key!r} is either true or false.", param=setting.key)
    return [_flag(setting.option)] if wanted else setting.option.secondary_opts[:1]


def _nearest(name: str, known: Mapping[str, click.Option]) -> str:
    visible = [key for key, option in known.items() if not option.hidden]
    close = difflib.get_close_matches(name.replace("_", "-"), visible, n=1)
    return f"Did you mean {close[0]!r}?" if close else "`--help` lists all options."


def _warn_of_readers(path: Path, settings: Iterable[Setting]) -> None:
    flags = [_flag(setting.option) for setting in settings]
    secret = next((flag for flag in flags if flag.split("-")[-1] in SECRETS), None)
    if secret and path.stat().st_mode & stat.S_IROTH:
        logger.warning("Everybody on this machine can read the `%s` in %s. Run: chmod 600 %s", secret, path, path)
