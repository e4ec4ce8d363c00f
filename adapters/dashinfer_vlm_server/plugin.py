"""The command `dashinfer-vlm serve`. FastAPI and uvicorn are imported when it runs, so that the plugin always loads."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from dashinfer_vlm_core.cli.options import config_options
from dashinfer_vlm_core.config import MIB, EngineConfig
from dashinfer_vlm_core.config.config_file import place_of
from dashinfer_vlm_core.errors import ConfigError, MissingDependency
from dashinfer_vlm_core.hookspecs import hookimpl

from .api_keys import KEY_VARIABLE, KEYS_VARIABLE, ApiKeys
from .help import Number, Option, SectionedCommand, Whole
from .logs import LogFormat, set_format
from .settings import Settings
from .sockets import Address, Tls

if TYPE_CHECKING:
    from .tracing import Tracer

logger: logging.Logger = logging.getLogger(__name__)

_Command = Callable[..., Any]


@hookimpl
def register_commands(group: click.Group) -> None:
    group.add_command(serve)


def _options(section: str, *options: Callable[..., _Command]) -> Callable[[_Command], _Command]:
    """Decorate a command with options of one section, in their order."""

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(section=section)(command)
        return command

    return decorate


def _option(*names: str, help: str, **attributes: Any) -> Callable[..., Callable[[_Command], _Command]]:  # noqa: A002 - click's word
    shown = attributes.get("default") not in (None, "")
    return partial(click.option, *names, cls=Option, help=help, show_default=shown, **attributes)


def _set_format(context: click.Context, _option: click.Parameter, log_format: LogFormat) -> LogFormat:
    """At once, so that what is wrong with other options is written so too."""
    if not context.resilient_parsing:
        set_format(log_format)
    return log_format


_file = click.Path(path_type=Path, dir_okay=False)

_LISTEN = (
    _option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on; 0.0.0.0 is all of them."),
    _option(
        "--port",
        default=8000,
        type=Whole(0, 65535),
        metavar="PORT",
        help="Port to listen on; 0 is a free one.",
    ),
    _option("--uds", type=_file, help="Unix socket to listen on, in place of host and port."),
    _option("--uds-mode", default="600", type=click.Choice(["600", "660"]), help="Permissions of that socket."),
    _option("--page/--no-page", default=True, help="Whether / answers with a page to ask from."),
    _option("--root-path", default="", metavar="PATH", help="Prefix of all paths, which a proxy in front takes off."),
)
_TRUST = (
    _option(
        "--api-key", "api_keys", multiple=True, envvar=[KEYS_VARIABLE, KEY_VARIABLE], metavar="KEY",
        help=f"Key that requests must bring; repeat it for more. Safer in {KEYS_VARIABLE} (separated by blanks)"
        " or in a file: `ps` shows command lines to everybody.",
    ),
    _option("--api-key-file", type=_file, help="File with such keys, one a line."),
    _option("--ssl-certfile", type=_file, help="Certificate of the server, with its chain: turns TLS on."),
    _option("--ssl-keyfile", type=_file, help="Key of that certificate."),
    _option("--ssl-keyfile-password", help="Password of that key."),
    _option("--ssl-ca-certs", type=_file, help="Authorities: clients must bring a certificate of one of them."),
    _option("--allowed-origins", default="", metavar="URL,...", also=list,
            help="Origins whose pages may ask (CORS), by commas; * is all of them."),
)  # fmt: skip
_LIMITS = (
    _option("--max-body-mib", default=288, type=Whole(min=1), metavar="MIB", help="Largest request."),
    _option("--max-held-mib", default=2048, type=Whole(min=1), metavar="MIB",
            help="All requests together that are served at one time."),
    _option("--max-body-pause", default=60.0, type=Number(0, min_open=True), metavar="SECONDS",
            help="How long the body of a request may stand still."),
    _option("--request-timeout", type=Number(0, min_open=True), metavar="SECONDS",
            help="How long an answer may take; no limit by default."),
    _option("--grace", default=20.0, type=Number(0), metavar="SECONDS",
            help="How long running requests may go on after a signal."),
)  # fmt: skip
_INSIGHT = (
    _option("--log-format", default="text", type=click.Choice(["text", "json"]), callback=_set_format,
            help="How log lines are written."),
    _option("--otlp-traces-endpoint", metavar="URL",
            help="Where traces go, by OTLP over HTTP: http://127.0.0.1:4318/v1/traces, for example."),
)  # fmt: skip


@click.command(cls=SectionedCommand)
@_options("Where it listens", *_LISTEN)
@_options("Who may ask", *_TRUST)
@_options("What a request may take", *_LIMITS)
@_options("Logs and traces", *_INSIGHT)
@config_options
def serve(*, config: EngineConfig, **options: Any) -> None:
    """Answer OpenAI's chat completions over HTTP.

    It listens on this machine alone, without keys and encryption, unless told otherwise. SIGTERM ends it in order. Exit
    codes: 0 ended by a signal, 2 something has to be mended first, 3 the decoder is lost: start it again.

    The environment sets options of the server: DASHINFER_VLM_PORT for --port, and so on.
    """
    gc.disable()  # until the model is loaded: it would look a hundred times at what stays, for a fifth of the time
    try:
        sys.exit(_serve(config, options))
    finally:
        gc.enable()


def _serve(config: EngineConfig, options: dict[str, Any]) -> int:
    try:
        from .serving import run
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"The server needs {error.name}, which is not installed. Run: pip install 'dashinfer-vlm-adapters[server]'"
        ) from error
    settings, address = _settings(options), _address(options)
    _warn(settings, address)
    return run(config, settings, address, grace=options["grace"])


def _settings(options: dict[str, Any]) -> Settings:
    origins = (origin.strip() for origin in options["allowed_origins"].split(","))
    return Settings(
        max_body_bytes=options["max_body_mib"] * MIB,
        max_buffered_bytes=options["max_held_mib"] * MIB,
        max_body_pause=options["max_body_pause"],
        request_timeout=options["request_timeout"],
        keys=ApiKeys.read(options["api_keys"], options["api_key_file"]),
        allowed_origins=tuple(filter(None, origins)),
        page=options["page"],
        tracer=_tracer(options["otlp_traces_endpoint"]),
    )


def _address(options: dict[str, Any]) -> Address:
    if options["ssl_certfile"] is None and (options["ssl_keyfile"] or options["ssl_ca_certs"]):
        raise ConfigError("--ssl-keyfile and --ssl-ca-certs go with --ssl-certfile only: give that too.")
    if (root := options["root_path"]) and (not root.startswith("/") or root.endswith("/")):
        raise ConfigError("--root-path begins with a slash and ends without one, as in /vision.")
    tls = options["ssl_certfile"] and Tls(
        certificate=options["ssl_certfile"],
        key=options["ssl_keyfile"],
        password=options["ssl_keyfile_password"],
        client_authorities=options["ssl_ca_certs"],
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
    try:
        from .tracing import tracer_to
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"Traces need {error.name}, which is not installed. Run: pip install 'dashinfer-vlm-adapters[otel]'"
        ) from error
    return tracer_to(endpoint)


def _warn(settings: Settings, address: Address) -> None:
    """What an operator may not have meant."""
    context = click.get_current_context()
    if context.get_parameter_source("api_keys") is ParameterSource.COMMANDLINE and not place_of("api_keys"):
        logger.warning("`ps` shows the keys of --api-key to everybody here: use %s or --api-key-file.", KEYS_VARIABLE)
    if address.public and not len(settings.keys):
        logger.warning("Other machines can reach this server, and it asks for no key: see --api-key-file.")
