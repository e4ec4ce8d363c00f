"""Which engine a command asks: one in this process, or that of a server."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from dashinfer_vlm_core.cli.options import config_options
from dashinfer_vlm_core.config import ENV_PREFIX, EngineConfig, option_fields
from dashinfer_vlm_core.errors import ConfigError, EngineClosed

if TYPE_CHECKING:
    from typing import TypeAlias

    from dashinfer_vlm_core.engine import Engine
    from dashinfer_vlm_core.engine.remote import RemoteEngine

    AnyEngine: TypeAlias = Engine | RemoteEngine

Command = Callable[..., Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSource:
    """Where the answers come from.

    Attributes:
        config: the engine to load, if there is no address.
        api_base: a server's address, up to and with `/v1`.
        api_key: for that server.
        model: the model to ask that server for; its own if None.
    """

    config: EngineConfig
    api_base: str | None = None
    api_key: str | None = None
    model: str | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[AnyEngine]:
        """The engine, ready, until the block ends.

        Raises:
            SetupError: it cannot be loaded, or the address is none.
            EngineClosed: the server cannot be reached.
        """
        if self.api_base is None:
            from dashinfer_vlm_core.engine import Engine

            click.echo(f"Loading {self.config.name} ...", err=True)
            with Engine(self.config) as engine:
                yield engine
        else:
            with self._remote(self.api_base) as remote:
                yield remote

    def _remote(self, api_base: str) -> RemoteEngine:
        from dashinfer_vlm_core.engine.remote import RemoteEngine

        remote = RemoteEngine(api_base, api_key=self.api_key, model=self.model)
        status = remote.status()
        if status.state != "ready":
            remote.close()
            raise EngineClosed(f"{api_base}: {status.fatal_error or 'the server is not ready.'}")
        remote.model = self.model or status.model
        return remote


def engine_options(command: Command) -> Command:
    """Decorate a command that is made by `click.command(cls=ConfiguredCommand)`: it gets the options that choose an
    engine, and a parameter `source`.

    Raises, when the command runs:
        ConfigError: an option of an engine in this process beside a server's address, or a value out of range.
    """

    @functools.wraps(command)
    def run(*args: Any, config: EngineConfig, api_base: str | None, api_key: str | None, **kwargs: Any) -> Any:
        quiet()
        given = _given()
        if api_base is not None and given - {"model"}:
            name = min(given - {"model"})
            raise ConfigError(
                f"`--{name.replace('_', '-')}` is for an engine in this process, and `--api-base` names a server, which"
                " has options of its own: leave out one of the two.",
                param=name,
            )
        model = config.model if "model" in given else None
        return command(
            *args, source=EngineSource(config=config, api_base=api_base, api_key=api_key, model=model), **kwargs
        )

    for option in (_API_KEY, _API_BASE):
        run = option(run)
    return config_options(run)


_API_BASE = click.option("--api-base", metavar="URL", help="Ask this server, such as http://127.0.0.1:8000/v1.")
_API_KEY = click.option(
    "--api-key", metavar="KEY", envvar=f"{ENV_PREFIX}API_KEY", show_envvar=True, help="The key that the server wants."
)


def _given() -> set[str]:
    """Names of the engine's options on the command line or in the file."""
    context = click.get_current_context()
    source = context.get_parameter_source
    return {name for name in option_fields() if source(name) is ParameterSource.COMMANDLINE}


def quiet() -> None:
    """Log warnings only, unless the person asks for more: the command itself says what matters."""
    root = click.get_current_context().find_root()
    if root.get_parameter_source("log_level") is ParameterSource.DEFAULT:
        logging.getLogger().setLevel(logging.WARNING)
