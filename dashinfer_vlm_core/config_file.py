"""Options of a command from a YAML file: `--config FILE`, for every command of the class `ConfiguredCommand`."""

from __future__ import annotations

import difflib
import json
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import click

from .errors import ConfigError

if TYPE_CHECKING:
    import yaml

Value: TypeAlias = "str | list[str] | dict[str, str]"

SECRETS = ("key", "token", "password", "secret")
"""Last words of the flags of options that other users of the machine should not read."""

_TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class EngineOption(click.Option):
    """An option of the engine, as many commands have it: help lists it behind the command's own."""


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
        options = read_options(Path(file), self)
        written = [word for option, value in options if option.name not in given for word in _words(option, value)]
        try:
            return super().parse_args(ctx, [*written, *args])
        except click.BadParameter as error:
            if any(option is error.param and option.name not in given for option, _ in options):
                raise click.BadParameter(f"{error.message} It comes from {file}.", error.ctx, error.param) from error
            raise

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


def read_options(path: Path, command: click.Command) -> list[tuple[click.Option, Value]]:
    """The options of `command` that a file sets, with their values as text.

    A file with keys or passwords in it that others may read is warned of.

    Raises:
        ConfigError: the file cannot be read, is no mapping in YAML, or has a key that is no option; the message names
            the line, and the option that may have been meant.
    """
    known = dict(_keys(command))
    found = {}
    for name, line, value in _pairs(path):
        option = known.get(name.replace("_", "-"))
        if option is None:
            raise ConfigError(f"{path}, line {line}: there is no option {name!r}. {_nearest(name, known)}", param=name)
        if option in found:
            raise ConfigError(f"{path}, line {line}: {name!r} is set twice. Keep one of the two.", param=name)
        found[option] = value
    _warn_of_readers(path, [option for option in found if _flag(option).split("-")[-1] in SECRETS])
    return list(found.items())


def _keys(command: click.Command) -> Iterator[tuple[str, click.Option]]:
    for option in command.params:
        if isinstance(option, click.Option) and option is not _CONFIG and not option.hidden:
            yield from ((flag[2:], option) for flag in option.opts if flag.startswith("--"))


def _pairs(path: Path) -> Iterator[tuple[str, int, Value]]:
    """Key, line and value of each entry. Values stay text: what they mean is for the option to say, not for YAML."""
    import yaml

    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Check the path (`--config`).") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read: it is no text in UTF-8.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}.") from error
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path} has to hold options by their names, such as `port: 8000`.")
    for key, node in root.value:
        line = key.start_mark.line + 1
        yield str(key.value), line, _value(node, f"{path}, line {line}: {key.value!r}")


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


def _words(option: click.Option, value: Value) -> list[str]:
    """A value as it would be written on the command line."""
    flag = _flag(option)
    if option.is_flag:
        return _flag_words(option, flag, value)
    if isinstance(value, dict):
        value = json.dumps(value)
    if isinstance(value, list):
        return [f"{flag}={item}" for item in value] if option.multiple else [f"{flag}={','.join(value)}"]
    return [f"{flag}={value}"]


def _flag(option: click.Option) -> str:
    return next(flag for flag in option.opts if flag.startswith("--"))


def _flag_words(option: click.Option, flag: str, value: Value) -> list[str]:
    wanted = _TRUTHS.get(value.lower()) if isinstance(value, str) else None
    if wanted is None:
        raise ConfigError(f"`{flag}` of the configuration file is either true or false.", param=option.name)
    return [flag] if wanted else option.secondary_opts[:1]


def _nearest(name: str, known: Mapping[str, click.Option]) -> str:
    close = difflib.get_close_matches(name.replace("_", "-"), known, n=1)
    return f"Did you mean {close[0]!r}?" if close else "`--help` lists all options."


def _warn_of_readers(path: Path, secrets: list[click.Option]) -> None:
    if secrets and path.stat().st_mode & stat.S_IROTH:
        click.echo(
            f"Warning: everybody on this machine can read the `{_flag(secrets[0])}` in {path}. Run: chmod 600 {path}",
            err=True,
        )
