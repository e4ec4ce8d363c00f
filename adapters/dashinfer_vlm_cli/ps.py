"""`dashinfer-vlm ps`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from dashinfer_vlm_core.cli.config_file import FileOption
from dashinfer_vlm_core.cli.terminal import printable, show_table
from dashinfer_vlm_core.config import ENV_PREFIX
from dashinfer_vlm_core.errors import EngineClosed

from .engines import log_warnings_only

if TYPE_CHECKING:
    from openai.types import Model

SECONDS = 5.0
"""For a response of the server."""


@click.command()
@click.option("--api-base", default="http://127.0.0.1:8000/v1", show_default=True, metavar="URL",
              help="Base URL of the server.")  # fmt: skip
@click.option("--api-key", cls=FileOption, metavar="KEY", envvar=f"{ENV_PREFIX}API_KEY", show_envvar=True,
              help="API key of the server.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def ps(*, api_base: str, api_key: str | None, as_json: bool) -> None:
    """List the models of a server and their states.

    A server of one model reports its own state. Other names of a model, and its LoRA adapters, have their own rows.
    """
    log_warnings_only()
    rows = [_row(model, state) for model, state in _models(api_base, api_key)]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        show_table(("Model", "State", "Of"), [(row["model"], row["state"], row["of"]) for row in rows])


def _models(api_base: str, api_key: str | None) -> list[tuple[Model, str]]:
    import openai

    from dashinfer_vlm_core.engine.remote import RemoteEngine, error_from_response

    with RemoteEngine(api_base, api_key=api_key) as engine:
        status = engine.status()
    if status.fatal_error:
        raise EngineClosed(f"{api_base}: {status.fatal_error}")
    client = openai.OpenAI(base_url=api_base, api_key=api_key or "none", max_retries=0, timeout=SECONDS)
    try:
        return [(model, status.state) for model in client.models.list().data]
    except openai.APIError as error:
        raise error_from_response(error) from error
    finally:
        client.close()


def _row(model: Model, state: str) -> dict[str, str]:
    extra = model.model_extra or {}
    root = extra.get("parent") or extra.get("root") or model.id
    return {
        "model": printable(model.id),
        "state": printable(str(extra.get("state") or state)),
        "of": "" if root == model.id else printable(str(root)),
    }
