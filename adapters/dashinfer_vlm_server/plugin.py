"""The command `dashinfer-vlm serve`. FastAPI and uvicorn are imported when it runs, so that the plugin always loads."""

from __future__ import annotations

import click

from dashinfer_vlm_core.cli_options import config_options
from dashinfer_vlm_core.config import MIB, EngineConfig
from dashinfer_vlm_core.config_file import ConfiguredCommand
from dashinfer_vlm_core.errors import MissingDependency
from dashinfer_vlm_core.hookspecs import hookimpl


@hookimpl
def register_commands(group: click.Group) -> None:
    group.add_command(serve)


@click.command(cls=ConfiguredCommand)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 is all of them.")
@click.option(
    "--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="Port to listen on; 0 is a free one."
)
@click.option(
    "--max-body-mib", default=288, show_default=True, type=click.IntRange(min=1), help="Largest request, in MiB."
)
@click.option("--page/--no-page", default=True, show_default=True, help="Whether / answers with a page to ask from.")
@config_options
def serve(*, host: str, port: int, max_body_mib: int, page: bool, config: EngineConfig) -> None:
    """Answer OpenAI's chat completions over HTTP.

    There are no keys and no encryption: listen on addresses of this machine, or behind a proxy that adds both.
    """
    try:
        from .serving import run
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"The server needs {error.name}, which is not installed. Run: pip install 'dashinfer-vlm-adapters[server]'"
        ) from error
    run(config, host=host, port=port, max_body_bytes=max_body_mib * MIB, page=page)
