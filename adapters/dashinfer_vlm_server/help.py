"""Options as fields of dataclasses, and `--help` with sections of related ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from dashinfer_vlm_core.cli.command import EngineCommand
from dashinfer_vlm_core.cli.config_file import FileOption
from dashinfer_vlm_core.cli.options import UNITS, EngineOption
from dashinfer_vlm_core.config import variable

from .logs import errors_as_records

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

ENGINE_SECTIONS: Mapping[str, str] = {
    "model": "Model",
    "max_model_len": "Scheduling and memory",
    "min_pixels": "Images and videos",
    "allow_remote_media": "Media sources",
}
"""The first field of `EngineConfig` in each section, and the section's title."""


class IntegerRange(click.IntRange):
    """An integer with bounds, called "integer" in error messages."""

    name = "integer"


class NumberRange(click.FloatRange):
    """A number with bounds, called "number" in error messages."""

    name = "number"


class Option(FileOption):
    """An option of the server, listed in a section of the help, that the environment can set.

    Args:
        section: title of the section.
        envvar: environment variables, if their names do not follow those of the engine's options.
    """

    def __init__(self, *args: Any, section: str, envvar: list[str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, envvar=envvar, **kwargs)
        self.section = section
        self.envvar: str | Sequence[str] | None = envvar or variable(
            next(flag for flag in self.opts if flag.startswith("--"))[2:]
        )

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        try:
            return super().process_value(ctx, value)
        except click.BadParameter as error:
            if ctx.get_parameter_source(self.name or "") is not ParameterSource.ENVIRONMENT:
                raise
            raise click.BadParameter(f"{error.message} {self._fix_hint(str(value))}", ctx, self) from error

    def _fix_hint(self, value: str) -> str:
        """Describe how to fix an invalid value from the environment."""
        if value.startswith("tcp://"):
            cause = f"Kubernetes sets {self.envvar} for a Service of that name"
            return f"{cause}. Add `enableServiceLinks: false` to the pod's spec, or set {self.opts[0]}."
        return f"It comes from the environment. Set {self.envvar} to another value, or unset it."


class Names(click.ParamType[tuple[str, ...]]):
    """A list that is separated by commas."""

    name = "NAME,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value


TYPES: Mapping[str, click.ParamType[Any]] = {
    "Path | None": click.Path(path_type=Path, dir_okay=False),
    "tuple[str, ...]": Names(),
}
"""The types of options by the annotations of fields, where click does not infer them from the default."""


METAVARS: Mapping[str, str] = {"int": "INT", "int | None": "INT"}


def option(section: str, default: Any, help: str, **attributes: Any) -> Any:  # noqa: A002 - click's name
    """Declare a field of a dataclass that is an option of the command line.

    Args:
        section: title of its section in the help.
        default: the default.
        help: the description.
        attributes: other attributes of a click option, and `flag`, if it is not named like the field.
    """
    return field(default=default, metadata={"section": section, "help": help, **attributes})


def options_of(*kinds: type[DataclassInstance]) -> list[click.Parameter]:
    """Return the options that the fields of dataclasses declare."""
    return [_option(declared) for kind in kinds for declared in fields(kind) if declared.metadata]


def _option(declared: Field[Any]) -> Option:
    name = declared.name.replace("_", "-")
    attributes = {
        "default": declared.default,
        "show_default": declared.default not in (None, "", ()),
        "metavar": UNITS.get(name.rsplit("-", maxsplit=1)[-1], METAVARS.get(str(declared.type))),
        **declared.metadata,
    }
    flag = attributes.pop("flag", f"--{name}/--no-{name}" if declared.type == "bool" else f"--{name}")
    if not attributes.get("multiple"):
        attributes.setdefault("type", TYPES.get(str(declared.type)))
    return Option([flag, declared.name], **attributes)


def from_options(kind: type[T], options: Mapping[str, Any]) -> T:
    """Create a dataclass from the values of its options."""
    return kind(**{declared.name: options[declared.name] for declared in fields(kind) if declared.metadata})


class SectionedCommand(EngineCommand):
    """A command whose options are listed by section, in the order of their declaration."""

    def invoke(self, ctx: click.Context) -> Any:
        with errors_as_records():
            return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        title = "Options"
        for parameter in self.get_params(ctx):
            title = _section(parameter, title)
            if (record := parameter.get_help_record(ctx)) is not None:
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def _section(parameter: click.Parameter, previous: str) -> str:
    """Return the title under which an option is listed: its own, or that of the preceding option."""
    if isinstance(parameter, Option):
        return parameter.section
    if isinstance(parameter, EngineOption) and parameter.plugin:
        return parameter.plugin
    if parameter.name in {"help", "config_file"}:
        return "Options"
    return ENGINE_SECTIONS.get(parameter.name or "", previous)
