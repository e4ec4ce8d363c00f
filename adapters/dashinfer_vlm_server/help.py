"""`--help` with sections of related options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click
from click.core import ParameterSource

from dashinfer_vlm_core.cli.command import EngineCommand
from dashinfer_vlm_core.cli.config_file import FileOption
from dashinfer_vlm_core.cli.options import EngineOption
from dashinfer_vlm_core.config import variable

from .logs import errors_as_records

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
        if value.startswith("tcp://"):
            cause = f"Kubernetes sets {self.envvar} for a Service of that name"
            return f"{cause}. Add `enableServiceLinks: false` to the pod's spec, or set {self.opts[0]}."
        return f"It comes from the environment. Set {self.envvar} to another value, or unset it."


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
    if isinstance(parameter, Option):
        return parameter.section
    if isinstance(parameter, EngineOption) and parameter.plugin:
        return parameter.plugin
    if parameter.name in {"help", "config_file"}:
        return "Options"
    return ENGINE_SECTIONS.get(parameter.name or "", previous)
