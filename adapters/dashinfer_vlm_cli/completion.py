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
    """Print a shell completion script.

    It completes commands, options and installed models.
    """
    root = context.find_root()
    program = root.info_name or "dashinfer-vlm"
    completion_class = get_completion_class(shell)
    assert completion_class is not None, "click supports all shells of HINTS"
    variable = f"_{program}_COMPLETE".replace("-", "_").upper()
    click.echo(completion_class(root.command, {}, program, variable).source())
    click.echo(f"# To enable it permanently, run once:  {HINTS[shell].format(program=program)}")
