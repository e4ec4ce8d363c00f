"""Logs of this package in the logs of Ray Serve."""

from __future__ import annotations

import logging

PACKAGES = tuple(f"dashinfer_vlm_{name}" for name in ("core", "server", "ray", "torch", "cpu"))


def log_to_serve() -> None:
    """Write the logs of this process with Ray Serve's handlers, which add the replica and the request's ID."""
    source = logging.getLogger("ray.serve")
    for name in PACKAGES:
        logger = logging.getLogger(name)
        logger.handlers = list(source.handlers)
        logger.setLevel(source.level)
        logger.propagate = False
