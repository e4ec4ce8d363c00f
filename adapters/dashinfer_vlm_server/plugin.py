"""The command `dashinfer-vlm serve`. FastAPI and uvicorn are imported when it runs, so the plugin always loads."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, get_args

import click
from click.core import ParameterSource

from dashinfer_vlm_core.cli.config_file import option_location
from dashinfer_vlm_core.cli.options import ModelArgument
from dashinfer_vlm_core.config import EngineConfig, variable
from dashinfer_vlm_core.embedding_store import EmbeddingStoreOptions
from dashinfer_vlm_core.errors import extra_required
from dashinfer_vlm_core.hooks import hookimpl
from dashinfer_vlm_core.progress import show_progress

from .api_keys import KEY_VARIABLE, KEYS_VARIABLE
from .help import Option, from_options, options_of
from .logs import LogFormat, set_format
from .model_options import MODELS, ModelOptions, ServeCommand
from .settings import ApplicationOptions, KeyOptions, ProcessOptions, Settings
from .sockets import Address, is_host_name

logger: logging.Logger = logging.getLogger(__name__)


@hookimpl
def register_commands(group: click.Group) -> None:
    group.add_command(serve)


def _set_format(context: click.Context, _option: click.Parameter, log_format: LogFormat) -> LogFormat:
    """Set the format immediately, so that errors in other options are also logged in it."""
    if not context.resilient_parsing:
        set_format(log_format)
    return log_format


_API_KEY = Option(
    ["--api-key", "api_keys"],
    section=KeyOptions.title,
    multiple=True,
    envvar=[KEYS_VARIABLE, KEY_VARIABLE],
    metavar="KEY",
    help=f"API key that clients must send; can be repeated. {KEYS_VARIABLE} (separated by spaces) and a file are safer:"
    " `ps` shows command lines to all users.",
)
_LOG_FORMAT = Option(
    ["--log-format"],
    envvar=variable("log_format"),
    section=ProcessOptions.title,
    type=click.Choice(get_args(LogFormat)),
    default="text",
    show_default=True,
    callback=_set_format,
    help="Format of log lines.",
)
APPLICATION_OPTIONS = [_API_KEY, *options_of(KeyOptions), *options_of(ApplicationOptions)]


@click.command(
    cls=ServeCommand,
    params=[
        ModelArgument(),
        *options_of(Address),
        *APPLICATION_OPTIONS,
        MODELS,
        *options_of(ModelOptions),
        *options_of(ProcessOptions),
        _LOG_FORMAT,
    ],
)
def serve(*, config: EngineConfig, models: Sequence[tuple[str, object]], **options: Any) -> None:
    """Serve OpenAI's, Anthropic's and Ollama's APIs over HTTP.

    MODEL is a registered name, a checkpoint folder, or a Hugging Face model ID, as --model; by default, the bundled
    model `demo`.

    By default, the server listens on localhost only, without API keys or TLS. SIGTERM shuts it down gracefully. Exit
    codes: 0 after a signal; 1 unexpected error; 2 setup error; 3 the decoder failed permanently.

    Its own options can also be set by environment variables, such as DASHINFER_VLM_PORT for --port.
    """
    # Until the model is loaded: about a hundred collections would scan objects that stay, for a fifth of the time.
    gc.disable()
    try:
        sys.exit(_serve(config, models, options))
    finally:
        gc.enable()


def create_settings(options: dict[str, Any], config: EngineConfig) -> Settings:
    """Create settings from the values of `APPLICATION_OPTIONS`, and of `--host` if it is one.

    Raises:
        ConfigError: a value is invalid, or a file cannot be read.
    """
    given = asdict(from_options(ApplicationOptions, options))
    if is_host_name(host := options.get("host", "")):
        given["allowed_hosts"] += (host,)
    return Settings(
        **given,
        keys=from_options(KeyOptions, options).read(options["api_keys"]),
        namespace_secret=config.options_of(EmbeddingStoreOptions).read_secret(),
    )


def _serve(config: EngineConfig, models: Sequence[tuple[str, object]], options: dict[str, Any]) -> int:
    with extra_required("The server", extra="server"), show_progress("Starting the server"):
        from .engines import create_engine
        from .serving import run
    process = from_options(ProcessOptions, options)
    address = from_options(Address, options)
    management = from_options(ModelOptions, options)
    settings = create_settings(options, config)
    settings = replace(settings, allow_model_management=management.allow_model_management)
    tracer = None
    if process.otlp_traces_endpoint is not None:
        with extra_required("The option --otlp-traces-endpoint", extra="server"):
            from .tracing import create_tracer
        tracer = create_tracer(process.otlp_traces_endpoint)
    _warn(settings, address, config.options_of(EmbeddingStoreOptions))
    engine = create_engine(isolate_clients(config, settings), models, management)
    return run(engine, settings, address, grace=process.grace, tracer=tracer)


def isolate_clients(config: EngineConfig, settings: Settings) -> EngineConfig:
    """Return the configuration of an engine for a server with these settings."""
    return config.model_copy(update={"isolate_clients": settings.isolates_keys})


def _warn(settings: Settings, address: Address, store: EmbeddingStoreOptions) -> None:
    context = click.get_current_context()
    if context.get_parameter_source("api_keys") is ParameterSource.COMMANDLINE and not option_location("api_keys"):
        logger.warning("`ps` shows the keys of --api-key to all users. Use %s or --api-key-file.", KEYS_VARIABLE)
    if address.is_public and not len(settings.keys):
        logger.warning("Other machines can reach this server, and it requires no API key. Set --api-key-file.")
    if store.embedding_store and settings.isolates_keys and not settings.namespace_secret:
        logger.warning(
            "Other processes cannot use the embeddings in the embedding store, since API keys share no cached data."
            " Set --embedding-store-secret-file, or --share-media-between-keys."
        )
