"""The commands, by name. Each is imported when it is used: `dashinfer-vlm --help` pays for none of them."""

from __future__ import annotations

import importlib
from typing import Any

import click

from dashinfer_vlm_core.hookspecs import hookimpl

COMMANDS = {
    "batch": "Answer a file of requests, in OpenAI's batch format.",
    "bench": "Measure how fast a server or a model answers.",
    "chat": "Talk with a model about pictures and videos.",
    "completion": "Print the script that completes this command line in a shell.",
    "doctor": "Say what is installed, what is missing, and how to mend it.",
    "models": "List the models that are here: registered, downloaded, in folders.",
}


class LazyCommand(click.Command):
    """Stands for the command of the same name in the module of the same name, until that is used."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """The context of the command itself, which click goes on with."""
        command: click.Command = getattr(importlib.import_module(f".{self.name}", __package__), str(self.name))
        return command.make_context(info_name, args, parent=parent, **extra)


@hookimpl
def register_commands(group: click.Group) -> None:
    for name, summary in COMMANDS.items():
        group.add_command(LazyCommand(name, short_help=summary))
