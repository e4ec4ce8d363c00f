"""`--help` in sections: what belongs together stands together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from dashinfer_vlm_core.config_file import ConfiguredCommand

ENGINE_SECTIONS: Mapping[str, str] = {
    "model": "What answers",
    "max_model_len": "How much at once",
    "tensor_parallel": "DashInfer alone",
    "min_pixels": "Pictures and videos",
    "allow_remote_media": "Where media may come from",
}
"""Fields of EngineConfig with which a section begins."""


class Option(click.Option):
    """An option that belongs to a section of the help."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class SectionedCommand(ConfiguredCommand):
    """A command whose options are listed by section, in the order in which they were declared."""

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
    if parameter.name in {"help", "config_file"}:
        return "Options"
    return ENGINE_SECTIONS.get(parameter.name or "", before)
