"""`dashinfer-vlm completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

HINTS = {
    "bash": "echo 'eval \"$({program} completion bash)\"' >> ~/.bashrc",
    "zsh": "echo 'eval \"$({program} completion zsh)\"' >> ~/.zshrc",
    "fish": "{program} completion fish > ~/.config/fish/completions/{program}.fish",
}


@click.command()
@click.argument("shell", type=click.Choice(list(HINTS)))
@click.pass_context
def completion(context: click.Context, *, shell: str) -> None:
    """Print the script that completes this command line in a shell: commands, options, and the models that are here."""
    root = context.find_root()
    program = root.info_name or "dashinfer-vlm"
    kind = get_completion_class(shell)
    assert kind is not None, "click knows the shells that it is asked for"
    variable = f"_{program}_COMPLETE".replace("-", "_").upper()
    click.echo(kind(root.command, {}, program, variable).source())
    click.echo(f"# To have it in every shell, run once:  {HINTS[shell].format(program=program)}")
