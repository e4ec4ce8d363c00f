"""The command line `dashinfer-vlm`. Adapters add their commands through the hook `register_commands`."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys

import click

from ..config import variable
from ..errors import DashInferVLMError
from ..kernels.threads import program_threads
from ..plugins import PluginRow, add_commands, load_plugins
from ..version import __version__
from .terminal import colored, has_colors

SETUP_FAILED = 2
"""Exit code of errors that the operator has to fix; click uses the same for an invalid command line."""


COMMAND_HINTS = {
    "collect-env": "Use `dashinfer-vlm doctor`.",
    "complete": "Use `dashinfer-vlm chat`.",
    "ls": "Use `dashinfer-vlm list`.",
    "run-batch": "Use `dashinfer-vlm batch`.",
    "stop": "A server ends with Ctrl-C, or with SIGTERM.",
}
"""What to use instead of commands of Ollama and vLLM."""


class CommandLine(click.Group):
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        hint = COMMAND_HINTS.get(args[0])
        if hint and self.get_command(ctx, args[0]) is None:
            raise click.UsageError(f"No such command {args[0]!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=CommandLine, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="dashinfer-vlm")
@click.option("--log-level", default="info", show_default=True, help="Minimum level of log records on standard error.",
              envvar=variable("log-level"), show_envvar=True,
              type=click.Choice(["debug", "info", "warning", "error"]))  # fmt: skip
def cli(log_level: str) -> None:
    """Run and serve vision-language models on your own machines."""
    program_threads()  # before commands import torch
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")


@cli.command("plugins", short_help="List the plugins, what they provide, and their problems.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--strict", is_flag=True, help="Exit with 1 if a plugin is broken.")
def list_plugins(as_json: bool, strict: bool) -> None:
    """List the installed plugins, what they provide, and the problems of broken ones."""
    logging.getLogger("dashinfer_vlm_core.plugins").setLevel(logging.CRITICAL)  # the list reports broken plugins
    rows = load_plugins().rows
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    else:
        _show(rows)
    if strict and any(row.status != "ok" for row in rows):
        sys.exit(1)


def _show(rows: list[PluginRow]) -> None:
    formatter = click.get_current_context().make_formatter()
    for row in rows:
        with formatter.section(f"{row.name} ({row.distribution}), {colored(row.status)}"):
            if row.problem:
                formatter.write(f"  {row.problem}\n")  # in one line, so that a command in it can be copied
            else:
                formatter.write_text(", ".join(row.provides) or "commands only")
    click.echo(formatter.getvalue().strip(), color=has_colors())


def main() -> None:
    """Entry point of the console script."""
    add_commands(cli)
    run(cli)


def run(command: click.Command) -> None:
    """Run a command. Print the errors of this package without a traceback, and exit with `SETUP_FAILED`."""
    try:
        command()
    except DashInferVLMError as error:
        click.echo(f"dashinfer-vlm: {error.message}", err=True)
        sys.exit(SETUP_FAILED)
