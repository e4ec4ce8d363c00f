"""The application: an ingress deployment and an engine deployment."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dashinfer_vlm_core.errors import extra_required
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_server.plugin import isolate_clients

from .config import RayConfig, Routing, parse_arguments

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.config import RequestRouterConfig

    from dashinfer_vlm_core.config import EngineConfig
    from dashinfer_vlm_server.settings import Settings

logger: logging.Logger = logging.getLogger("ray.serve")

ENGINE = "engine"
INGRESS = "ingress"
"""Names of the deployments, by which Ray Serve's configuration file refers to them."""

MAX_INGRESS_REQUESTS = 4096
"""Requests that an ingress replica holds at once; the engine deployment limits those that run or wait."""

MAX_BACKOFF_SECONDS = 0.1
"""Maximum time after which a waiting request finds a replica that has become free."""

ROUTERS: Mapping[Routing, str] = {
    "content": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
    "load": "ray.serve._private.request_router.pow_2_router.PowerOfTwoChoicesRequestRouter",
    "round-robin": "ray.serve.experimental.round_robin_router.RoundRobinRouter",
}


def app(arguments: dict[str, Any]) -> Application:
    """Build the application from arguments: `serve run dashinfer_vlm_ray:app model=demo max_replicas=4`.

    Args:
        arguments: fields of `RayConfig`, and options of `dashinfer-vlm serve`.

    Raises:
        ConfigError: an option is unknown or does not apply, or its value is invalid.
    """
    return build_app(parse_arguments(arguments))


def build_app(config: RayConfig | None = None) -> Application:
    """Build an application for `serve.run`.

    Args:
        config: the configuration; `RayConfig()` if None.

    Raises:
        MissingDependency: Ray Serve is not installed.
    """
    with extra_required("The Ray Serve adapter", extra="ray"):
        from ray import serve

        from .ingress import Ingress

    config = config or RayConfig()
    _warn_of_cpu_shortage(config)
    settings = _shared_settings(config.settings)
    engine_config = load_plugins().resolve_options(isolate_clients(_engine_config(config), settings))
    engine = _engine_deployment(config).bind(engine_config, threads=config.threads)
    ingress = serve.deployment(
        Ingress,
        name=INGRESS,
        num_replicas=config.ingress_replicas,
        max_ongoing_requests=MAX_INGRESS_REQUESTS,
        ray_actor_options={"num_cpus": config.ingress_cpus},
        graceful_shutdown_timeout_s=config.grace,
    )
    return ingress.bind(engine, model=engine_config.name, settings=settings)


def cpu_shortage(config: RayConfig, available: float) -> str | None:
    """Return a message if a cluster with `available` CPUs has too few for the application."""
    required = config.min_replicas * config.cpus + config.ingress_replicas * config.ingress_cpus
    if required <= available:
        return None
    replicas = f"`min_replicas` {config.min_replicas} x `cpus` {config.cpus:g}"
    ingress = f"`ingress_replicas` {config.ingress_replicas} x `ingress_cpus` {config.ingress_cpus:g}"
    return (
        f"The application requires {required:g} CPUs, and the cluster has {available:g}: {replicas} + {ingress}."
        " Lower these options, or add CPUs; until then, the application is not ready."
    )


def _warn_of_cpu_shortage(config: RayConfig) -> None:
    """Log what the application lacks, now or when this process joins a cluster: `serve run` builds it before that."""
    import ray
    from ray._private.worker import _post_init_hooks

    def warn() -> None:
        if shortage := cpu_shortage(config, ray.cluster_resources().get("CPU", 0)):
            logger.warning(shortage)

    if ray.is_initialized():
        warn()
    else:
        _post_init_hooks.append(warn)


def _engine_deployment(config: RayConfig) -> Any:
    from ray import serve

    from .engine_replica import EngineReplica

    return serve.deployment(
        EngineReplica,
        name=ENGINE,
        max_ongoing_requests=config.max_ongoing_requests or config.engine.max_batch_size,
        max_queued_requests=max(1, config.engine.max_waiting),  # Ray Serve has no 0
        ray_actor_options={"num_cpus": config.cpus, "num_gpus": config.gpus},
        graceful_shutdown_timeout_s=config.grace,
        health_check_period_s=config.health_check_period,
        health_check_timeout_s=config.health_check_timeout,
        request_router_config=_router_config(config),
        **_scaling(config),
    )


def _router_config(config: RayConfig) -> RequestRouterConfig:
    from ray.serve.config import RequestRouterConfig

    options = {"num_fallback_replicas": config.fallback_replicas} if config.routing == "content" else {}
    return RequestRouterConfig(
        request_router_class=ROUTERS[config.routing], request_router_kwargs=options, max_backoff_s=MAX_BACKOFF_SECONDS
    )


def _scaling(config: RayConfig) -> dict[str, Any]:
    from ray.serve.config import AutoscalingConfig

    if config.max_replicas in {None, config.min_replicas}:
        return {"num_replicas": config.min_replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=config.min_replicas,
            max_replicas=config.max_replicas,
            target_ongoing_requests=config.target_ongoing_requests or max(1, config.engine.max_batch_size // 2),
            upscale_delay_s=config.upscale_delay,
            downscale_delay_s=config.downscale_delay,
        )
    }


def _engine_config(config: RayConfig) -> EngineConfig:
    # A replica shares its machine: media workers follow the reserved CPUs.
    if config.engine.media_workers is not None:
        return config.engine
    return config.engine.model_copy(update={"media_workers": math.ceil(config.cpus) + 1})


def _shared_settings(settings: Settings) -> Settings:
    return settings if settings.namespace_secret else replace(settings, namespace_secret=os.urandom(32))
