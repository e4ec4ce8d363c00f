"""The commands, by name. Each one is imported when it is used, so that `dashinfer-vlm --help` is fast."""

from __future__ import annotations

import importlib
from typing import Any

import click

from dashinfer_vlm_core.hooks import hookimpl

COMMANDS = {
    "batch": "Run a file of requests in OpenAI's batch format.",
    "bench": "Measure the speed of a server or a model.",
    "chat": "Chat with a model about images, videos and documents.",
    "completion": "Print a shell completion script.",
    "doctor": "Check the installation, and report how to fix problems.",
    "models": "List the models on this machine: registered, downloaded, in folders.",
    "ocr": "Convert PDFs and images to Markdown.",
    "tune": "Measure the CPU kernels with a model, and store the fastest for its next starts.",
    "verify": "Verify the vision encoder and the decoders on a GPU, and measure their speed.",
}


class LazyCommand(click.Command):
    """A placeholder that imports the command of the same name from the module of the same name on first use."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Return the context of the real command, with which click continues."""
        command: click.Command = getattr(importlib.import_module(f".{self.name}", __package__), str(self.name))
        return command.make_context(info_name, args, parent=parent, **extra)


@hookimpl
def register_commands(group: click.Group) -> None:
    for name, summary in COMMANDS.items():
        group.add_command(LazyCommand(name, short_help=summary))
