"""Serve a model with Ray Serve: replicas of the engine behind the application of the server.

    serve run dashinfer_vlm_ray:app model=demo max_replicas=4

or from Python:

    from dashinfer_vlm_core import EngineConfig
    from dashinfer_vlm_ray import RayConfig, build_app
    from ray import serve

    serve.run(build_app(RayConfig(engine=EngineConfig(model="demo"), max_replicas=4)))
"""

from __future__ import annotations

from dashinfer_vlm_core.errors import extra_required

with extra_required("The Ray Serve adapter", extra="ray"):
    from .application import app, build_app
    from .config import RayConfig
    from .ray_engine import RayEngine

__all__ = ["RayConfig", "RayEngine", "app", "build_app"]
