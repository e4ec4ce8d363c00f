"""Select the engine of a command: one in this process, or a server."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from dashinfer_vlm_core import progress
from dashinfer_vlm_core.cli.config_file import FileOption
from dashinfer_vlm_core.cli.options import EngineOption
from dashinfer_vlm_core.config import ENV_PREFIX, EngineConfig
from dashinfer_vlm_core.errors import ConfigError, EngineClosed

if TYPE_CHECKING:
    from typing import TypeAlias, TypeVar

    from dashinfer_vlm_core.engine import ChatEngine, Engine
    from dashinfer_vlm_core.engine.remote import RemoteEngine

    AnyEngine: TypeAlias = Engine | RemoteEngine
    T = TypeVar("T")

Command = Callable[..., Any]

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""

RETRIES = 3
"""Retries of a request after a transient error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSource:
    """The engine that a command uses.

    Attributes:
        config: the configuration of the engine to load if `api_base` is None.
        api_base: the base URL of a server, including `/v1`.
        api_key: the server's API key.
        model: the model to request from the server; its default model if None.
    """

    config: EngineConfig
    api_base: str | None = None
    api_key: str | None = None
    model: str | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[AnyEngine]:
        """Load the engine or connect to the server, and close it at the end of the block.

        Raises:
            SetupError: the engine cannot be loaded, or the URL is invalid.
            EngineClosed: the server cannot be reached.
        """
        if self.api_base is None:
            with _interruptible(self.config.name), progress.show_progress(f"Loading {self.config.name}"):
                from dashinfer_vlm_core.engine import Engine  # its import takes a second

                engine = Engine(self.config).start()
            with engine:
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


async def with_retries(
    engine: AnyEngine, work: Callable[[ChatEngine], Awaitable[T]], *, max_retries: int = RETRIES
) -> T:
    """Return what `work` returns for an engine, called again after transient errors. Raises its last error."""
    from dashinfer_vlm_core.engine.shared import call_engine  # as in `open`

    async def started() -> ChatEngine:
        return engine

    return await call_engine(started, work, timeout=None, max_retries=max_retries)


@contextlib.contextmanager
def _interruptible(model: str) -> Iterator[None]:
    """End the process on Ctrl-C at once, instead of waiting for the threads that load the model."""

    def end(_number: int, _frame: FrameType | None) -> None:
        click.echo(f"\nInterrupted while {model} was loaded. Run the same command to load it again.", err=True)
        sys.stderr.flush()
        os._exit(INTERRUPTED)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def engine_source_options(command: Command) -> Command:
    """Add the options that select an engine, and pass an `EngineSource` as the parameter `source`.

    The command must be created by `click.command(cls=EngineCommand)`.

    Raises, when the command runs:
        ConfigError: an engine option is combined with `--api-base`, or a value is out of range.
    """

    @functools.wraps(command)
    def run(*args: Any, config: EngineConfig, api_base: str | None, api_key: str | None, **kwargs: Any) -> Any:
        log_warnings_only()
        given = _given()
        if api_base is not None and given - {"model"}:
            name = min(given - {"model"})
            raise ConfigError(
                f"`--{name.replace('_', '-')}` configures an engine in this process, and cannot be combined with"
                " `--api-base`. Leave out one of the two.",
                param=name,
            )
        model = config.model if "model" in given else None
        return command(
            *args, source=EngineSource(config=config, api_base=api_base, api_key=api_key, model=model), **kwargs
        )

    for option in (_API_KEY, _API_BASE):
        run = option(run)
    return run


_API_BASE = click.option(
    "--api-base",
    metavar="URL",
    help="Base URL of a server to use instead of loading a model, such as http://127.0.0.1:8000/v1.",
)
_API_KEY = click.option(
    "--api-key",
    cls=FileOption,
    metavar="KEY",
    envvar=f"{ENV_PREFIX}API_KEY",
    show_envvar=True,
    help="API key of the server.",
)


def _given() -> set[str]:
    context = click.get_current_context()
    names = {param.name for param in context.command.get_params(context) if isinstance(param, EngineOption)}
    given = {ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP}
    return {name for name in names if name and context.get_parameter_source(name) in given}


def log_warnings_only() -> None:
    """Log warnings and progress only, unless `--log-level` is set. The command itself prints what matters."""
    root = click.get_current_context().find_root()
    if root.get_parameter_source("log_level") is ParameterSource.DEFAULT:
        logging.getLogger().setLevel(logging.WARNING)
        logging.getLogger(progress.__name__).setLevel(logging.INFO)
