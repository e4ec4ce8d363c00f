"""Logs of this package in the logs of Ray Serve."""

from __future__ import annotations

import logging

PACKAGES = ("dashinfer_vlm_core", "dashinfer_vlm_server", "dashinfer_vlm_ray", "dashinfer_vlm_torch", "dashinfer_vlm_cpu")


def log_to_serve() -> None:
    """Write the logs of this process with Ray Serve's handlers and level, which add the replica and the request's ID."""
    source = logging.getLogger("ray.serve")
    for name in PACKAGES:
        logger = logging.getLogger(name)
        logger.handlers = list(source.handlers)
        logger.setLevel(source.level)
        logger.propagate = False
