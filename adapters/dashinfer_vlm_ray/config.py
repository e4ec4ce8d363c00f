"""The configuration of a Ray Serve application: in Python, or as the arguments of `serve run`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Literal

import click
from pydantic import Field, InstanceOf, model_validator
from pydantic_settings import SettingsConfigDict
from typing_extensions import Self

from dashinfer_vlm_core.cli.config_file import FileOption, option_values
from dashinfer_vlm_core.cli.options import option_attributes
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.config.options import Options
from dashinfer_vlm_core.errors import ConfigError
from dashinfer_vlm_server.help import ServerCommand
from dashinfer_vlm_server.plugin import APPLICATION_OPTIONS, create_settings
from dashinfer_vlm_server.settings import Settings
from dashinfer_vlm_server.sockets import Address

Routing = Literal["content", "load", "round-robin"]

SERVED_BY_RAY: Mapping[str, str] = {
    **dict.fromkeys(
        (declared.name for declared in fields(Address)),
        "Ray Serve's proxy listens: set `http_options` of its configuration file, or options of `serve start`",
    ),
    "log_format": "Ray Serve writes the logs: set `logging_config` of its configuration file",
    "otlp_traces_endpoint": "Ray Serve records traces: see its documentation",
}
"""Options of `dashinfer-vlm serve` that do not apply, and why."""


class RayConfig(Options):
    """The configuration of an application. Options that are not given come from the environment, as in `EngineConfig`.

    Attributes:
        engine: the configuration of each replica's engine.
        settings: the settings of the application: limits, keys, hosts and origins.

    Raises:
        ConfigError: a value is out of range, or two options contradict each other.
    """

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(allow_inf_nan=False)

    title: ClassVar[str] = "Replicas"
    python_only: ClassVar[frozenset[str]] = frozenset({"engine", "settings"})
    reference: ClassVar[str] = "The page on Ray Serve"

    engine: EngineConfig = Field(default_factory=EngineConfig)
    settings: InstanceOf[Settings] = Field(default_factory=Settings)

    min_replicas: int = Field(1, ge=1)
    """Minimum number of replicas of the engine."""

    max_replicas: int | None = None
    """Maximum number of replicas; more than `min_replicas` enables autoscaling."""

    target_ongoing_requests: float | None = Field(None, gt=0)
    """Mean number of running requests of a replica that autoscaling aims at; defaults to half of the batch size."""

    max_ongoing_requests: int | None = Field(None, ge=1)
    """Maximum number of running requests of a replica; the next one is sent to another replica, or waits. Defaults to
    the batch size."""

    upscale_delay: float = Field(30.0, ge=0)
    """Seconds of higher load before replicas are added."""

    downscale_delay: float = Field(600.0, ge=0)
    """Seconds of lower load before replicas are removed."""

    cpus: float = Field(1.0, ge=0)
    """CPUs that Ray reserves for a replica, and, rounded down but at least 1, threads of its computations."""

    gpus: float = Field(0.0, ge=0)
    """GPUs that Ray reserves for a replica; 0 computes on CPUs."""

    routing: Routing = "content"
    """`content` sends requests about one image to one replica, `load` to the replica with fewer running requests of
    two, `round-robin` to all replicas in order."""

    fallback_replicas: int = Field(2, ge=0)
    """Number of other replicas that a request may be sent to if its replica is busy; for routing by content."""

    ingress_replicas: int = Field(1, ge=1)
    """Number of processes that parse requests and write responses."""

    ingress_cpus: float = Field(1.0, ge=0)
    """CPUs that Ray reserves for each of them."""

    grace: float = Field(20.0, ge=0)
    """Seconds for running requests to finish before a replica is stopped."""

    health_check_period: float = Field(10.0, gt=0)
    """Seconds between two health checks of a replica."""

    health_check_timeout: float = Field(30.0, gt=0)
    """Seconds after which a health check has failed."""

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ConfigError(
                f"`max_replicas` must be at least `min_replicas`, {self.min_replicas}, got {self.max_replicas}.",
                param="max_replicas",
            )
        if self.ingress_replicas > 1 and self.settings.max_stored_responses:
            raise ConfigError(
                "`ingress_replicas` above 1 requires `max_stored_responses=0`: a response of the Responses API is"
                " stored in the memory of one ingress replica, where the next request may not arrive.",
                param="ingress_replicas",
            )
        return self

    @property
    def threads(self) -> int:
        """Number of threads that compute in a replica."""
        return max(1, int(self.cpus))


def parse_arguments(arguments: Mapping[str, Any]) -> RayConfig:
    """Parse the arguments of an application, as of `serve run` or of a configuration file of Ray Serve.

    Args:
        arguments: name -> value. Names are fields of `RayConfig`, options of `dashinfer-vlm serve` and of the engine;
            `config` is the path of a YAML file with more of them, and `limits` a mapping of fields of `Limits`.
            Environment variables apply as to `dashinfer-vlm serve`.

    Raises:
        ConfigError: an option is unknown or does not apply, or its value is invalid.
    """
    for name in arguments:
        if reason := SERVED_BY_RAY.get(name.replace("-", "_")):
            raise ConfigError(f"`{name}` does not apply here: {reason}. Remove it.", param=name)
    options = dict(arguments)
    limits = options.pop("limits", None)
    values = option_values(_command, options)
    try:
        config: RayConfig = _command.main(
            [], prog_name="dashinfer_vlm_ray:app", standalone_mode=False, default_map=values
        )
    except click.ClickException as error:
        raise ConfigError(error.format_message()) from error
    if limits is None:
        return config
    engine = config.engine.model_copy(update={"limits": EngineConfig(limits=limits).limits})
    return config.model_copy(update={"engine": engine})


_OPTIONS = RayConfig.option_fields()


@click.command(
    cls=ServerCommand,
    params=[
        *(FileOption(section=RayConfig.title, **option_attributes(RayConfig, *option)) for option in _OPTIONS.items()),
        *APPLICATION_OPTIONS,
    ],
)
def _command(*, config: EngineConfig, **options: Any) -> RayConfig:
    given = {name: options[name] for name in _OPTIONS if options[name] is not None}
    return RayConfig(engine=config, settings=create_settings(options, config), **given)
