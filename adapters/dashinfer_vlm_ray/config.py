"""The configuration of a Ray Serve application: in Python, or as the arguments of `serve run`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import click

from dashinfer_vlm_core.cli.config_file import option_values
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import ConfigError
from dashinfer_vlm_server.help import IntegerRange, NumberRange, Option, SectionedCommand
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


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """The configuration of an application.

    Attributes:
        engine: the configuration of each replica's engine.
        settings: the settings of the application: limits, keys, hosts and origins.
        min_replicas: minimum number of replicas of the engine, at least 1.
        max_replicas: maximum number of replicas; more than `min_replicas` enables autoscaling.
        target_ongoing_requests: mean number of running requests of a replica that autoscaling aims at; half of the
            batch size if None.
        max_ongoing_requests: maximum number of running requests of a replica; the next one is sent to another replica,
            or waits. The batch size if None.
        upscale_delay: seconds of higher load before replicas are added.
        downscale_delay: seconds of lower load before replicas are removed.
        cpus: CPUs that Ray reserves for a replica, and, rounded down but at least 1, threads of its computations.
        gpus: GPUs that Ray reserves for a replica; 0 computes on CPUs.
        routing: `content` sends requests about one image to one replica, `load` to the replica with fewer running
            requests of two, `round-robin` to all replicas in order.
        fallback_replicas: number of other replicas that a request may be sent to if its replica is busy, at least 0;
            for routing by content.
        ingress_replicas: number of processes that parse requests and write responses, at least 1.
        ingress_cpus: CPUs that Ray reserves for each of them.
        grace: seconds for running requests to finish before a replica is stopped.
        health_check_period: seconds between two health checks of a replica.
        health_check_timeout: seconds after which a health check has failed.

    Raises:
        ConfigError: a value is out of range, or two options contradict each other.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    settings: Settings = field(default_factory=Settings)
    min_replicas: int = 1
    max_replicas: int | None = None
    target_ongoing_requests: float | None = None
    max_ongoing_requests: int | None = None
    upscale_delay: float = 30.0
    downscale_delay: float = 600.0
    cpus: float = 1.0
    gpus: float = 0.0
    routing: Routing = "content"
    fallback_replicas: int = 2
    ingress_replicas: int = 1
    ingress_cpus: float = 1.0
    grace: float = 20.0
    health_check_period: float = 10.0
    health_check_timeout: float = 30.0

    def __post_init__(self) -> None:
        for name in ("min_replicas", "ingress_replicas"):
            self._check(name, getattr(self, name) >= 1, "must be at least 1")
        for name in ("upscale_delay", "downscale_delay", "cpus", "gpus", "ingress_cpus", "grace", "fallback_replicas"):
            self._check(name, 0 <= getattr(self, name) < math.inf, "must be a finite number of at least 0")
        for name in ("target_ongoing_requests", "health_check_period", "health_check_timeout"):
            self._check(name, getattr(self, name) is None or getattr(self, name) > 0, "must be above 0")
        self._check("routing", self.routing in get_args(Routing), f"must be one of {', '.join(get_args(Routing))}")
        self._check(
            "max_ongoing_requests",
            self.max_ongoing_requests is None or self.max_ongoing_requests >= 1,
            "must be at least 1",
        )
        self._check(
            "max_replicas",
            self.max_replicas is None or self.max_replicas >= self.min_replicas,
            f"must be at least `min_replicas`, {self.min_replicas}",
        )
        if self.ingress_replicas > 1 and self.settings.max_stored_responses:
            raise ConfigError(
                "`ingress_replicas` above 1 requires `max_stored_responses=0`: a response of the Responses API is"
                " stored in the memory of one ingress replica, where the next request may not arrive.",
                param="ingress_replicas",
            )

    @property
    def threads(self) -> int:
        """Number of threads that compute in a replica."""
        return max(1, int(self.cpus))

    def _check(self, name: str, valid: bool, requirement: str) -> None:
        if not valid:
            raise ConfigError(f"`{name}` {requirement}, got {getattr(self, name)!r}.", param=name)


def parse_arguments(arguments: Mapping[str, Any]) -> RayConfig:
    """Parse the arguments of an application, as of `serve run` or of a configuration file of Ray Serve.

    Args:
        arguments: name -> value. Names are fields of `RayConfig`, options of `dashinfer-vlm serve` and of the engine;
            `config` is the path of a YAML file with more of them. Environment variables apply as to
            `dashinfer-vlm serve`.

    Raises:
        ConfigError: an option is unknown or does not apply, or its value is invalid.
    """
    for name in arguments:
        if reason := SERVED_BY_RAY.get(name.replace("-", "_")):
            raise ConfigError(f"`{name}` does not apply here: {reason}. Remove it.", param=name)
    values = option_values(_command, arguments)
    try:
        config: RayConfig = _command.main(
            [], prog_name="dashinfer_vlm_ray:app", standalone_mode=False, default_map=values
        )
    except click.ClickException as error:
        raise ConfigError(error.format_message()) from error
    return config


_TYPES: Mapping[str, click.ParamType[Any]] = {
    "min_replicas": IntegerRange(1),
    "max_replicas": IntegerRange(1),
    "target_ongoing_requests": NumberRange(0, min_open=True),
    "max_ongoing_requests": IntegerRange(1),
    "upscale_delay": NumberRange(0),
    "downscale_delay": NumberRange(0),
    "cpus": NumberRange(0),
    "gpus": NumberRange(0),
    "routing": click.Choice(get_args(Routing)),
    "fallback_replicas": IntegerRange(0),
    "ingress_replicas": IntegerRange(1),
    "ingress_cpus": NumberRange(0),
    "grace": NumberRange(0),
    "health_check_period": NumberRange(0, min_open=True),
    "health_check_timeout": NumberRange(0, min_open=True),
}
"""The options that are fields of `RayConfig`."""


def _replica_option(name: str) -> Option:
    default = RayConfig.__dataclass_fields__[name].default
    return Option([f"--{name.replace('_', '-')}"], section="Replicas", type=_TYPES[name], default=default)


@click.command(cls=SectionedCommand, params=[*map(_replica_option, _TYPES), *APPLICATION_OPTIONS])
def _command(*, config: EngineConfig, **options: Any) -> RayConfig:
    return RayConfig(
        engine=config,
        settings=create_settings(options, config),
        **{name: options[name] for name in _TYPES},
    )
