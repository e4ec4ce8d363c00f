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
    "divergence": "Measure how much a quantized model differs from the original.",
    "doctor": "Check the installation, and report how to fix problems.",
    "embed": "Compute embeddings of images, videos, PDFs and text files.",
    "list": "List the models on this machine: registered, downloaded, in folders.",
    "models": "List the models on this machine: registered, downloaded, in folders.",
    "ocr": "Convert PDFs and images to Markdown.",
    "ps": "List the models of a server and their states.",
    "pull": "Download a model, after a check of what it needs.",
    "quantize": "Write a checkpoint with 4-bit weights.",
    "rm": "Delete a downloaded model.",
    "run": "Download a model if it is not on this machine, and chat with it.",
    "show": "Show what a model is, and what it needs of this machine.",
    "tune": "Measure the CPU kernels with a model, and store the fastest for its next starts.",
    "verify": "Verify the vision encoder and the decoders on a GPU, and measure their speed.",
}


ALIASES = {"list": "models"}
"""Commands that have the implementation of another one."""


class LazyCommand(click.Command):
    """A placeholder that imports the command from the module of the same name, see `ALIASES`, on first use."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Return the context of the real command, with which click continues."""
        name = ALIASES.get(str(self.name), str(self.name))
        command: click.Command = getattr(importlib.import_module(f".{name}", __package__), name)
        return command.make_context(info_name, args, parent=parent, **extra)


@hookimpl
def register_commands(group: click.Group) -> None:
    for name, summary in COMMANDS.items():
        group.add_command(LazyCommand(name, short_help=summary))
