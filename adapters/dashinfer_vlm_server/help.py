"""`--help` in sections: what belongs together stands together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click
from click.core import ParameterSource

from dashinfer_vlm_core.config import variable
from dashinfer_vlm_core.config.config_file import ConfiguredCommand, EngineOption, FileOption

from .logs import endings_as_records

ENGINE_SECTIONS: Mapping[str, str] = {
    "model": "What answers",
    "max_model_len": "How much at once",
    "min_pixels": "Pictures and videos",
    "allow_remote_media": "Where media may come from",
}
"""Fields of EngineConfig with which a section begins."""


class Whole(click.IntRange):
    """Whole numbers, which errors call by that name."""

    name = "whole number"


class Number(click.FloatRange):
    """Numbers, likewise."""

    name = "number"


class Option(FileOption):
    """An option of the server: it belongs to a section of the help, and the environment sets it too.

    Args:
        section: its title.
        envvar: its variables, if they are not as those of the engine's options are.
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
            raise click.BadParameter(f"{error.message} {self._mend(str(value))}", ctx, self) from error

    def _mend(self, value: str) -> str:
        """What to do about a value from the environment."""
        if value.startswith("tcp://"):
            why = f"Kubernetes sets {self.envvar} for a Service of that name"
            return f"{why}: write `enableServiceLinks: false` into the pod's spec, or give {self.opts[0]}."
        return f"It comes from the environment: set {self.envvar} to another value, or unset it."


class SectionedCommand(ConfiguredCommand):
    """A command whose options are listed by section, in the order in which they were declared."""

    def invoke(self, ctx: click.Context) -> Any:
        with endings_as_records():
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


def _section(parameter: click.Parameter, before: str) -> str:
    """Where an option is listed: its own section, or that of the one before it."""
    if isinstance(parameter, Option):
        return parameter.section
    if isinstance(parameter, EngineOption) and parameter.plugin:
        return parameter.plugin
    if parameter.name in {"help", "config_file"}:
        return "Options"
    return ENGINE_SECTIONS.get(parameter.name or "", before)
