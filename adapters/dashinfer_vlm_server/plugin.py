"""The command `dashinfer-vlm serve`. FastAPI and uvicorn are imported when it runs, so the plugin always loads."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from dashinfer_vlm_core.cli.config_file import option_location
from dashinfer_vlm_core.config import MIB, EngineConfig
from dashinfer_vlm_core.embedding_store import EmbeddingStoreOptions
from dashinfer_vlm_core.errors import ConfigError, extra_required
from dashinfer_vlm_core.hooks import hookimpl

from .api_key_file import MAX_LIMIT, KeyLimits
from .api_keys import KEY_VARIABLE, KEYS_VARIABLE, ApiKeys
from .help import IntegerRange, NumberRange, Option, SectionedCommand
from .logs import LogFormat, set_format
from .settings import Settings
from .sockets import Address, TlsConfig, is_host_name, normalize_allowed_host

if TYPE_CHECKING:
    from .tracing import Tracer

logger: logging.Logger = logging.getLogger(__name__)

_Command = Callable[..., Any]


@hookimpl
def register_commands(group: click.Group) -> None:
    group.add_command(serve)


def _options(section: str, *options: Callable[..., _Command]) -> Callable[[_Command], _Command]:
    """Decorate a command with the options of one section, in order."""

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(section=section)(command)
        return command

    return decorate


def _option(*names: str, help: str, **attributes: Any) -> Callable[..., Callable[[_Command], _Command]]:  # noqa: A002 - click's name
    show_default = attributes.get("default") not in (None, "")
    return partial(click.option, *names, cls=Option, help=help, show_default=show_default, **attributes)


def _set_format(context: click.Context, _option: click.Parameter, log_format: LogFormat) -> LogFormat:
    """Set the format immediately, so that errors in other options are also logged in it."""
    if not context.resilient_parsing:
        set_format(log_format)
    return log_format


_file = click.Path(path_type=Path, dir_okay=False)

_PAGE = _option(
    "--page/--no-page", default=True, help="Whether to serve the chat page at / and POST /v1/media/preview."
)
_NETWORK = (
    _option(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on; 0.0.0.0 for all IPv4 interfaces."
    ),
    _option(
        "--port",
        default=8000,
        type=IntegerRange(0, 65535),
        metavar="PORT",
        help="Port to listen on; 0 selects a free port.",
    ),
    _option("--uds", type=_file, help="Unix socket to listen on, instead of host and port."),
    _option("--uds-mode", default="600", type=click.Choice(["600", "660"]), help="Permissions of the Unix socket."),
    _PAGE,
    _option("--root-path", default="", metavar="PATH", help="Path prefix that a reverse proxy strips."),
)
_KEYS = (
    _option(
        "--api-key", "api_keys", multiple=True, envvar=[KEYS_VARIABLE, KEY_VARIABLE], metavar="KEY",
        help=f"API key that clients must send; can be repeated. {KEYS_VARIABLE} (separated by spaces) and a file are"
        " safer: `ps` shows command lines to all users.",
    ),
    _option("--api-key-file", type=_file,
            help="File with API keys, one per line, which limits can follow; read again when it changes."),
    _option("--share-media-between-keys/--no-share-media-between-keys", default=False,
            help="Whether requests with different API keys share cached images, videos and prompts."),
)  # fmt: skip
_TLS = (
    _option("--ssl-certfile", type=_file, help="Certificate chain of the server; enables TLS."),
    _option("--ssl-keyfile", type=_file, help="Private key of the certificate."),
    _option("--ssl-keyfile-password", help="Password of the private key."),
    _option("--ssl-ca-certs", type=_file,
            help="CA certificates; clients must present a certificate signed by one of them."),
)  # fmt: skip
_ORIGINS = (
    _option("--allowed-hosts", default="", metavar="NAME,...",
            help="Host names that clients may use if there are no API keys, in addition to loopback names and IP"
            " addresses, separated by commas; * allows all."),
    _option("--allowed-origins", default="", metavar="URL,...",
            help="Origins allowed to send requests (CORS), separated by commas; * allows all."),
)  # fmt: skip
_LIMITS = (
    _option("--max-body-mib", default=288, type=IntegerRange(min=1), metavar="MIB",
            help="Maximum size of a request body."),
    _option("--max-buffered-mib", default=2048, type=IntegerRange(min=1), metavar="MIB",
            help="Maximum total size of request bodies held in memory."),
    _option("--max-stored-responses", default=1000, type=IntegerRange(min=0), metavar="INT",
            help="Maximum number of responses of the Responses API in memory; 0 stores none."),
    _option("--max-stored-mib", default=256, type=IntegerRange(min=1), metavar="MIB",
            help="Maximum memory of stored responses, with the images and videos of their requests."),
    _option("--max-body-pause", default=60.0, type=NumberRange(0, min_open=True), metavar="SECONDS",
            help="Timeout between two chunks of a request body, and of a whole body in addition to a second per 16"
            " KiB."),
    _option("--max-requests-per-key", type=IntegerRange(1, MAX_LIMIT), metavar="INT",
            help="Maximum number of concurrent requests of an API key without its own limit."),
    _option("--tokens-per-minute-per-key", type=IntegerRange(1, MAX_LIMIT), metavar="INT",
            help="Maximum number of prompt and completion tokens per minute of an API key without its own limit."),
    _option("--request-timeout", type=NumberRange(0, min_open=True), metavar="SECONDS",
            help="Maximum time for a response; no limit by default."),
    _option("--grace", default=20.0, type=NumberRange(0), metavar="SECONDS",
            help="Grace period for running requests after a signal."),
)  # fmt: skip
_OBSERVABILITY = (
    _option("--log-format", default="text", type=click.Choice(["text", "json"]), callback=_set_format,
            help="Format of log lines."),
    _option("--otlp-traces-endpoint", metavar="URL",
            help="OTLP/HTTP endpoint for traces, such as http://127.0.0.1:4318/v1/traces."),
)  # fmt: skip


@click.command(cls=SectionedCommand)
@_options("Network", *_NETWORK)
@_options("Security", *_KEYS, *_TLS, *_ORIGINS)
@_options("Request limits", *_LIMITS)
@_options("Logs and traces", *_OBSERVABILITY)
def serve(*, config: EngineConfig, **options: Any) -> None:
    """Serve OpenAI's Chat Completions and Responses APIs over HTTP.

    By default, the server listens on localhost only, without API keys or TLS. SIGTERM shuts it down gracefully. Exit
    codes: 0 after a signal; 1 unexpected error; 2 setup error; 3 the decoder failed permanently.

    Options can also be set by environment variables, such as DASHINFER_VLM_PORT for --port and
    DASHINFER_VLM_MAX_PIXELS for --max-pixels.
    """
    # Until the model is loaded: about a hundred collections would scan objects that stay, for a fifth of the time.
    gc.disable()
    try:
        sys.exit(_serve(config, options))
    finally:
        gc.enable()


def application_options(command: _Command) -> _Command:
    """Add the options of the application to a click command. Those of sockets, logs and traces belong to its host."""
    for section, options in (("Request limits", _LIMITS), ("Security", (*_KEYS, *_ORIGINS)), ("Network", (_PAGE,))):
        command = _options(section, *options)(command)
    return command


def create_settings(options: dict[str, Any], config: EngineConfig) -> Settings:
    """Create settings from the values of `application_options`, and of `--host` and `--otlp-traces-endpoint` if given.

    Raises:
        ConfigError: a value is invalid, or a file cannot be read.
    """
    secret = config.options_of(EmbeddingStoreOptions).read_secret()
    return replace(_settings({"host": "", "otlp_traces_endpoint": None, **options}), namespace_secret=secret)


def _serve(config: EngineConfig, options: dict[str, Any]) -> int:
    with extra_required("The server", extra="server"):
        from .serving import run
    settings, address = create_settings(options, config), _address(options)
    _warn(settings, address, config.options_of(EmbeddingStoreOptions))
    return run(isolate_clients(config, settings), settings, address, grace=options["grace"])


def isolate_clients(config: EngineConfig, settings: Settings) -> EngineConfig:
    """Return the configuration of an engine for a server with these settings."""
    return config.model_copy(update={"isolate_clients": True}) if settings.isolates_keys else config


def _settings(options: dict[str, Any]) -> Settings:
    return Settings(
        max_body_bytes=options["max_body_mib"] * MIB,
        max_buffered_bytes=options["max_buffered_mib"] * MIB,
        max_stored_responses=options["max_stored_responses"],
        max_stored_bytes=options["max_stored_mib"] * MIB,
        max_body_pause=options["max_body_pause"],
        request_timeout=options["request_timeout"],
        keys=_keys(options),
        share_media_between_keys=options["share_media_between_keys"],
        allowed_hosts=_allowed_hosts(options),
        allowed_origins=_split(options["allowed_origins"]),
        page=options["page"],
        tracer=_tracer(options["otlp_traces_endpoint"]),
    )


def _allowed_hosts(options: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of `--allowed-hosts`, and that of `--host` if it is a name."""
    names = tuple(map(normalize_allowed_host, _split(options["allowed_hosts"])))
    return (*names, options["host"]) if is_host_name(options["host"]) else names


def _split(text: str) -> tuple[str, ...]:
    """Split a list that is separated by commas."""
    return tuple(filter(None, (item.strip() for item in text.split(","))))


def _keys(options: dict[str, Any]) -> ApiKeys:
    limits = KeyLimits(
        max_requests=options["max_requests_per_key"], tokens_per_minute=options["tokens_per_minute_per_key"]
    )
    keys = ApiKeys.read(options["api_keys"], options["api_key_file"], limits=limits)
    if limits != KeyLimits() and not len(keys):
        raise ConfigError(
            "--max-requests-per-key and --tokens-per-minute-per-key require API keys. Set --api-key-file."
        )
    return keys


def _address(options: dict[str, Any]) -> Address:
    if options["ssl_certfile"] is None and (options["ssl_keyfile"] or options["ssl_ca_certs"]):
        raise ConfigError("--ssl-keyfile and --ssl-ca-certs require --ssl-certfile. Set it too.")
    if (root := options["root_path"]) and (not root.startswith("/") or root.endswith("/")):
        raise ConfigError(f"--root-path must start with a slash and end without one, such as /vision, got {root}.")
    tls = options["ssl_certfile"] and TlsConfig(
        certificate=options["ssl_certfile"],
        key=options["ssl_keyfile"],
        password=options["ssl_keyfile_password"],
        ca_certs=options["ssl_ca_certs"],
    )
    return Address(
        host=options["host"],
        port=options["port"],
        path=options["uds"],
        mode=int(options["uds_mode"], 8),
        tls=tls,
        root_path=options["root_path"],
    )


def _tracer(endpoint: str | None) -> Tracer | None:
    if endpoint is None:
        return None
    with extra_required("The option --otlp-traces-endpoint", extra="otel"):
        from .tracing import create_tracer
    return create_tracer(endpoint)


def _warn(settings: Settings, address: Address, store: EmbeddingStoreOptions) -> None:
    """Warn about settings that expose the server, perhaps unintentionally."""
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
